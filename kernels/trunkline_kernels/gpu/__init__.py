"""The Triton kernels. Tests compare each one with its PyTorch reference, which its module names.

Importing a module needs no GPU. With TRITON_INTERPRET=1 the kernels run on a CPU, slowly, for tests.
"""
