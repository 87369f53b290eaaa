"""What a model computes, read from its config.json: one module for each architecture."""
