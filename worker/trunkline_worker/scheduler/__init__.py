"""Which sequences run, and which of their tokens each step computes. Pure."""
