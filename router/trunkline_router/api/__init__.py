"""The RPCs that clients and operators call."""
