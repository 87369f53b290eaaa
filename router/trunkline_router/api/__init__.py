"""The calls that clients make."""
