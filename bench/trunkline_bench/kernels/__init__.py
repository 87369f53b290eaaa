"""The Triton kernels without a GPU: what each needs of a chip, and how long a step should take."""
