"""The engine process: requests in, steps computed, outputs out."""
