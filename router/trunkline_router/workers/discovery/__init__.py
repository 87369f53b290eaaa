"""Finds the addresses of workers."""
