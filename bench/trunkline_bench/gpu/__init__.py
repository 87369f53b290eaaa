"""`make bench-gpu`: the worker's device code, measured where there is a GPU.

Needs torch, triton, numpy and the engine; nothing of the router.
"""
