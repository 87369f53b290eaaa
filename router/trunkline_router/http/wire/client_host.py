"""The host that a client's connections are counted for."""

import socket

NETWORK_BYTES = 8  # of an IPv6 address: a /64 belongs to one client, which may use any address of it
IPV4_MAPPED = bytes(10) + b"\xff\xff"  # begins an IPv4 address as a socket for both families shows it


def counted_host(address: str) -> str:
    """Returns the host that a client's address is counted for: an IPv4 address itself, and of IPv6 the /64."""
    if ":" not in address:
        return address
    try:
        packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0])
    except OSError:
        return address
    if packed.startswith(IPV4_MAPPED):
        return socket.inet_ntop(socket.AF_INET, packed[len(IPV4_MAPPED) :])
    return packed[:NETWORK_BYTES].hex()
