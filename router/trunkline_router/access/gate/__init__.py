"""Limits on incoming calls: how many are open, how large they are, and in which order they are read."""
