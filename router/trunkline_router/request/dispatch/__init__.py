"""Sends a request to a worker, and to another one if that worker fails."""
