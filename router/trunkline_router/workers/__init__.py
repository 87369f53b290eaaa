"""Connections to workers, their health, and the pools that they make."""
