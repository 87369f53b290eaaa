"""The name of a process among those of its service, in logs, traces and metrics, if its settings give it none."""

import socket
from ipaddress import ip_address


def instance_name(host: str, port: int) -> str:
    """host:port. If it listens on all addresses, which processes of other machines do too, with the machine's name."""
    return f"{socket.gethostname() if _is_wildcard(host) else host}:{port}"


def _is_wildcard(host: str) -> bool:
    try:
        return not host or ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False
