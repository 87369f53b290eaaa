"""The Python client: asynchronous, synchronous, and directly to workers."""
