"""The life of a call: prepared, charged, dispatched or granted, and observed."""
