"""Tenants' quotas and usage, the stores that keep them, and the state that routers share. The modules here are pure."""
