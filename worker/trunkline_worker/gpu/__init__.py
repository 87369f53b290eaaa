"""Running steps on a GPU: rows that stay there, inputs built there, captured graphs, results copied beside the work.

Imported only where the Triton kernels are used: Triton is not there on every system.
"""
