"""What a step is to compute, and what comes of it."""
