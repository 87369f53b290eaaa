"""Workers that are known by several names: 127.0.0.1 and localhost, a pod's name and its address.

A worker is one worker by whichever name it is reached: its requests, its cache and its load are counted once. Two names
are one worker's where it says the same of itself by both, and both lead to the same address and port.
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
    """What is known here of a router's connection to a worker."""

    address: str
    worker: ConnectedWorker | None


class SameWorker(Exception):
    """Another link has this worker already. One line for a person."""

    def __init__(self, holder: Link) -> None:
        super().__init__(f"the same worker as {holder.address}")
        self.holder = holder


Place = frozenset[tuple[str, str]]  # IP addresses and port that a name stands for; empty: it could not be looked up


async def place_of(address: str) -> Place:
    """Where connections to host:port go."""
    host, _, port = address.rpartition(":")
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return frozenset()
    return frozenset((_canonical(entry[4][0]), port) for entry in found)


def _canonical(ip: str | int) -> str:
    """One name for all of a host's own addresses of itself."""
    return "loopback" if ip_address(str(ip).partition("%")[0]).is_loopback else str(ip)


class WorkerNames:
    """Which of a router's links has which life of a worker; a worker's epoch is drawn anew at each start.

    A worker that only claims another one's name and epoch, from elsewhere, takes neither its place nor its requests.
    """

    def __init__(self) -> None:
        self._holders: dict[tuple[str, int], list[tuple[Link, Place]]] = {}

    @contextmanager
    def held(self, model: GetModelResponse, link: Link, place: Place) -> Iterator[None]:
        """The worker is this link's, in here. Raises SameWorker."""
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
