"""Addresses: host:port of a worker, and a client's as gRPC writes it.

`--workers` may also name a host that DNS resolves to several workers.
"""

DNS_PREFIX = "dns:"  # of an entry of --workers that DNS resolves to several workers


def is_address(text: str) -> bool:
    """Whether the text is host:port with a host without spaces and a port from 1 to 65535."""
    host, _, port = text.rpartition(":")
    is_host = bool(host) and host.isprintable() and " " not in host
    return is_host and len(port) <= 5 and port.isascii() and port.isdigit() and 1 <= int(port) <= 65535


def host_of(peer: str) -> str:
    """The host in a peer's address as gRPC writes it: "ipv4:10.0.0.1" of "ipv4:10.0.0.1:50312"."""
    return peer.rpartition(":")[0]
