"""Tenants' quotas and usage. Pure."""
