"""The engine's process: requests in, steps, news out."""
