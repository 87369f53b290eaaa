"""Metrics of a router process, for Prometheus and OpenTelemetry."""
