"""Runs steps: forward pass and sampling with torch and the C kernels, and the threads that run any StepRunner."""
