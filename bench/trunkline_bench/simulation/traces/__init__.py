"""Workloads: requests read from traces or generated."""
