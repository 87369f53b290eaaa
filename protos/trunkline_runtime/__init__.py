"""Shared parts of the server processes: settings, logs, traces, error translation, the gRPC server."""
