"""The lanes, the accounts of their tenants, and how much may wait in them. Pure."""
