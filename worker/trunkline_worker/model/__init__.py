"""A model: its checkpoint, its decoders for CPU and GPU, and the memory for its KV blocks."""
