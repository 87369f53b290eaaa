"""Identities, roles and tenants: what a caller may do, and the limits on a call before it is parsed."""
