"""Access control for calls to the worker, and bounds on their number and size."""
