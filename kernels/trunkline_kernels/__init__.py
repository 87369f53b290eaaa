"""The device code of a Trunkline worker. Each operation has a plain PyTorch twin that is its truth."""
