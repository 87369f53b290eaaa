"""What grammars cost an engine, on a simulated device."""
