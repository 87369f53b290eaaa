"""`make bench-gpu`: measures the worker's device code on a GPU.

Needs torch, triton, numpy and the engine, but nothing of the router.
"""
