"""Metrics that are counted at the ends of requests."""
