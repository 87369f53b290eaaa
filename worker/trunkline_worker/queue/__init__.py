"""Sequences that wait. Pure."""
