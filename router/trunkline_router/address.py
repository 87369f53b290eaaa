"""Addresses: host:port of a worker, and a client's, as gRPC or a socket gives it.

`--workers` may also name a host that DNS resolves to several workers.
"""

from ipaddress import IPv6Address

DNS_PREFIX = "dns:"  # of an entry of --workers that DNS resolves to several workers
IPV6_NETWORK_BITS = 64  # of one customer, which has all addresses in it


def is_address(text: str) -> bool:
    """Whether the text is host:port with a host without spaces and a port from 1 to 65535."""
    host, _, port = text.rpartition(":")
    is_host = bool(host) and host.isprintable() and " " not in host
    return is_host and len(port) <= 5 and port.isascii() and port.isdigit() and 1 <= int(port) <= 65535


def host_of(peer: str) -> str:
    """The host in a peer's address as gRPC writes it: "ipv4:10.0.0.1" of "ipv4:10.0.0.1:50312"."""
    return peer.rpartition(":")[0]


def network_of(host: str) -> str:
    """The network of a client's host: of IPv6 the /64, of IPv4 the address itself.

    host: as gRPC writes it, "ipv4:10.0.0.1" or "ipv6:[2001:db8::1]", or the address alone, which is the same network
    """
    address = host.removeprefix("ipv6:")
    if ":" not in address.removeprefix("ipv4:"):
        return host.removeprefix("ipv4:")
    try:
        parsed = IPv6Address(address.replace("%5B", "[").replace("%5D", "]").strip("[]").partition("%")[0])
    except ValueError:
        return host
    if parsed.ipv4_mapped is not None:  # as a socket for both families shows an IPv4 address
        return str(parsed.ipv4_mapped)
    return f"ipv6:{int(parsed) >> (128 - IPV6_NETWORK_BITS):x}"
