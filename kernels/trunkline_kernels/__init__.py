"""The device code of a Trunkline worker. Each operation has a plain PyTorch reference that defines its results."""
