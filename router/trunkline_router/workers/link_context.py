"""What all links of a router to its workers have in common.

A worker may have several names: 127.0.0.1 and localhost, a pod's name and its address. Its requests, cache and load are
counted once, under one name. Two names belong to one worker if it reports the same id and epoch under both, and both
resolve to the same address and port.
"""

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from ipaddress import ip_address
from random import Random
from typing import TYPE_CHECKING

from trunkline.grant import GrantKeys
from trunkline.proof import Metadata, proof_metadata
from trunkline.tls import ClientTls
from trunkline.v1.worker_pb2 import GetModelResponse
from trunkline_router.routing.prefix_index import PrefixIndex
from trunkline_router.workers.tokenizer_pool import Tokenizers
from trunkline_runtime.tls_settings import is_loopback

if TYPE_CHECKING:
    from trunkline_router.workers.worker_link import WorkerLink


class SameWorker(Exception):
    """Another link has this worker already. The message is one line."""

    def __init__(self, holder: "WorkerLink") -> None:
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
        self._holders: dict[tuple[str, int], list[tuple[WorkerLink, Place]]] = {}

    @contextmanager
    def held(self, model: GetModelResponse, link: "WorkerLink", place: Place) -> Iterator[None]:
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


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """Time limits of links."""

    inter_token_timeout_s: float = 10.0  # a worker that has work and sends nothing for this long counts as hung
    slow_start_s: float = 10.0  # in which a new or recovered worker reaches its full share of requests


@dataclass(frozen=True, slots=True)
class LinkSecurity:
    """How links are secured."""

    tls: ClientTls | None = None  # None: plaintext
    allow_plaintext: bool = False  # also to workers that are not on the loopback interface

    def problem(self, address: str) -> str:
        """Why a worker at host:port must not be connected; "" if it may."""
        if self.tls is not None or self.allow_plaintext or is_loopback(address.rpartition(":")[0]):
            return ""
        return "not on the loopback interface: set --worker-tls-ca, or permit plaintext with --allow-plaintext"


@dataclass(frozen=True, slots=True)
class LinkContext:
    """What all links of a router have in common."""

    router_id: str
    tokenizers: Tokenizers
    index: PrefixIndex
    on_change: Callable[[], None]  # called when requests can be sent to a worker, or no longer can
    rng: Random
    limits: LinkLimits = LinkLimits()
    grant_keys: GrantKeys = field(default_factory=GrantKeys)
    clock_s: Callable[[], float] = time.monotonic
    names: WorkerNames = field(default_factory=WorkerNames)
    security: LinkSecurity = LinkSecurity()

    def proof(self, method: str, model: GetModelResponse) -> Metadata:
        """Returns metadata that proves to the worker that this router may call the method."""
        now_unix_ms = int(time.time() * 1e3)
        key = self.grant_keys.of_worker(model)
        return proof_metadata(key, method, worker_id=model.worker_id, epoch=model.epoch, now_unix_ms=now_unix_ms)
