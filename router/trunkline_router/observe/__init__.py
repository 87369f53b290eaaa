"""Spans, metrics, samples for the live page, and recent requests."""
