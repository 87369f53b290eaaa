"""Checks and completes a client's request before it is sent to workers."""
