"""The HTTP edge driven by clients that were not written here, unmodified, against a cluster of real processes."""
