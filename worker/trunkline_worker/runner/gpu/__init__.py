"""Runs steps on a GPU: rows stay there, inputs are built there, graphs are captured, results are copied concurrently.

Imported only where the Triton kernels are used, because Triton is not installed on every system.
"""
