"""The `trunkline` command, and the launcher of a local cluster."""
