"""What a step of the engine should take on a device, from what its kernels move and compute: nothing is run."""
