"""Makes the spans of requests from their records, and keeps those that are worth it."""
