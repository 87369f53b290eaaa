"""What constrains outputs: grammars, compiled and matched in processes of their own."""
