"""A step on the CPU: forward pass and sampling."""
