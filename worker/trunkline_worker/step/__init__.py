"""What a step computes, and its result."""
