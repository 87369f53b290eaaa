"""Whether a target of gRPC is on this machine."""

from ipaddress import IPv6Address, ip_address


def is_local(target: str) -> bool:
    """Whether all addresses of a gRPC target are loopback addresses or sockets of this machine.

    A name other than localhost is not resolved and counts as remote, and so does a target that cannot be read.
    """
    scheme, colon, rest = target.partition(":")
    if colon and scheme in ("unix", "unix-abstract"):
        return True
    if colon and scheme in ("ipv4", "ipv6"):
        return all(_is_loopback(address) for address in rest.split(","))
    if colon and scheme == "dns":
        authority, slash, endpoint = (
            rest.removeprefix("//").partition("/") if rest.startswith("//") else ("", "/", rest)
        )
        return bool(slash) and not authority and _is_loopback(endpoint)  # an authority is a DNS server
    return _is_loopback(target)


def _is_loopback(host_and_port: str) -> bool:
    host = _host(host_and_port)
    if host.lower() == "localhost":
        return True
    try:
        address = ip_address(host)
    except ValueError:
        return False
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped.is_loopback
    return address.is_loopback


def _host(host_and_port: str) -> str:
    """The host of host:port, [v6]:port or a bare host or address."""
    if host_and_port.startswith("["):
        return host_and_port[1:].partition("]")[0]
    return host_and_port if host_and_port.count(":") > 1 else host_and_port.partition(":")[0]
