"""Whether a request that a worker lost is tried again."""
