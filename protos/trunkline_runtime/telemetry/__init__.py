"""What traces and metrics of all server processes share."""
