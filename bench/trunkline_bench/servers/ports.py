"""Ports for servers that a measurement or a test starts."""

import socket
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from random import Random

LOWEST = 10_000  # below lie well-known ones, and our own defaults
OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")
OUTGOING_FROM = 32_768  # where nothing else is known


def lowest_outgoing() -> int:
    """The first port that the kernel gives to outgoing connections."""
    try:
        lowest = int(OUTGOING.read_text().split()[0])
    except OSError:
        return OUTGOING_FROM
    return lowest if lowest > LOWEST else OUTGOING_FROM  # where it gives all of them, none is better than another


def _candidates() -> Iterator[int]:
    ports, order = range(LOWEST, lowest_outgoing()), Random()  # each process has an order of its own
    for _ in repeat(None):
        yield from order.sample(ports, len(ports))


_untried = _candidates()


def free_port() -> int:
    """One that nobody listens on now, on 127.0.0.1, and that stays free until its server starts, or starts again: no
    outgoing connection is given it, and this process is not given it twice before all others."""
    for port in _untried:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError("there is always another candidate")
