"""Free ports for servers that measurements and tests start."""

import contextlib
import os
import socket
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from random import Random

LOWEST = 10_000  # above well-known ports
OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")
OUTGOING_FROM = 32_768  # the kernel's default
NUM_PARTS = 32  # of the range: processes that start servers at the same time mostly have different ones


def lowest_outgoing() -> int:
    """The lowest port that the kernel assigns to outgoing connections."""
    try:
        lowest = int(OUTGOING.read_text().split()[0])
    except OSError:
        return OUTGOING_FROM
    return lowest if lowest > LOWEST else OUTGOING_FROM  # if it may assign any port, no range is safe


def _candidates() -> Iterator[int]:
    own, order = os.getpid() % NUM_PARTS, Random()  # a random order per process
    ports = [port for port in range(LOWEST, lowest_outgoing()) if port // 2 % NUM_PARTS == own]
    for _ in repeat(None):
        yield from order.sample(ports, len(ports))


_untried = _candidates()


def free_port() -> int:
    """A port of 127.0.0.1 without a listener. It stays free until its server starts, or restarts: the kernel does not
    assign it to outgoing connections, and this process gets it again only after all others."""
    for port in _untried:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError("there is always another candidate")


def two_free_ports() -> int:
    """The first of two ports as free_port() has them, one after the other."""
    while True:
        port = free_port()
        if port % 2:
            continue  # the next one may be another process's
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port + 1))
            return port
