"""Servers and models that measurements and tests start: free ports, a real Redis, the demo model."""
