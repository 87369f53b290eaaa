"""How checkpoints store quantised weights: what config.json says of it, and what the stored tensors stand for."""
