"""How many calls are taken in, how large, and in whose turn."""
