"""Ports for servers that a measurement starts."""

import socket


def free_port() -> int:
    """One that nobody listens on now, on 127.0.0.1."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
