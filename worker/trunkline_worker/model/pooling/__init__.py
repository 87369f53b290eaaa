"""Models whose output for a prompt is a vector or a score: what is made of hidden states, as checkpoints say it."""
