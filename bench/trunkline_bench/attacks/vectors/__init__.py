"""Attack vectors: what hostile clients, workers and writers to Redis send."""
