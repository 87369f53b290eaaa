"""What every server process shares: settings, logs, traces, error translation, the gRPC server."""
