"""Streams workers' output to clients."""
