"""Recognizes a worker that has several names: 127.0.0.1 and localhost, a pod's name and its address.

Its requests, cache and load are counted once, under one name. Two names belong to one worker if it reports the same id
and epoch under both, and both resolve to the same address and port.
"""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from typing import Protocol

from trunkline.v1.worker_pb2 import GetModelResponse
from trunkline_router.workers.connected_worker import ConnectedWorker


class Link(Protocol):
    """The part of a WorkerLink that is needed here."""

    address: str
    worker: ConnectedWorker | None


class SameWorker(Exception):
    """Another link has this worker already. The message is one line."""

    def __init__(self, holder: Link) -> None:
        super().__init__(f"the same worker as {holder.address}")
        self.holder = holder


Place = frozenset[tuple[str, str]]  # (IP address, port) pairs of a name; empty: the lookup failed


async def place_of(address: str) -> Place:
    """Returns where connections to host:port go."""
    host, _, port = address.rpartition(":")
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return frozenset()
    return frozenset((_canonical(entry[4][0]), port) for entry in found)


def _canonical(ip: str | int) -> str:
    """Maps all loopback addresses to one name."""
    return "loopback" if ip_address(str(ip).partition("%")[0]).is_loopback else str(ip)


class WorkerNames:
    """Which link of a router holds which life of a worker. A worker draws a new epoch at each start.

    A worker elsewhere that claims another one's id and epoch takes neither its place nor its requests.
    """

    def __init__(self) -> None:
        self._holders: dict[tuple[str, int], list[tuple[Link, Place]]] = {}

    @contextmanager
    def held(self, model: GetModelResponse, link: Link, place: Place) -> Iterator[None]:
        """Holds the worker for this link. Raises SameWorker if another link holds it."""
        life = model.worker_id, model.epoch
        holders = self._holders.setdefault(life, [])
        for holder, held_place in holders:
            if place & held_place or not (place and held_place):
                raise SameWorker(holder)
        entry = (link, place)
        holders.append(entry)
        try:
            yield
        finally:
            holders.remove(entry)
            if not holders:
                del self._holders[life]
