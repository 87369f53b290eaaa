"""How sequences come together in batches: continuous batching, and the batches it is measured against. Pure."""
