"""Checks whether workers' messages can be true."""
