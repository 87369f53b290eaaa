"""Decides whether a request that a worker lost is retried."""
