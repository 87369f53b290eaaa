"""The Triton kernels. Each has a plain PyTorch reference in the folder above, which is its truth.

Importing a module needs no GPU. With TRITON_INTERPRET=1 the kernels run on a CPU, slowly: for tests.
"""
