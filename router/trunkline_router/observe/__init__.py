"""Spans, metrics, samples for the live page, and the search for requests at all routers."""
