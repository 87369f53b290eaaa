"""What an answer consists of: its typed parts, found in the output of its choices."""
