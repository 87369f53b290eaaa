"""Chooses the worker for a request. Pure."""
