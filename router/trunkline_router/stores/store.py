"""What a store of shared state does, and the values that go in and out of one.

Two calls: `reserve`, on a request's path, and `sync`, in the background, which says what one router has to say and
answers with what the others said. Everything that a router says is absolute (its credits, its tokens in flight), or
counted once (`Report.number`), or sent again in full when the store has lost it.

A store has a **life**: a random name that it gets when it is found empty, or found again as something that may have
forgotten (another process, come up with what the former one had saved some time before). A router that names another
life than the present one is not listened to; it learns the present one, and enters its part of the state again.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from trunkline_router.quotas.quota import Quotas, Refusal, Used
from trunkline_router.routing.credit import Credit

TTL_MS = 3_000  # a router that says nothing for so long is dead
KEEP_MS = 600_000  # how long it is remembered how many reports of it were counted
MAX_CONVICTIONS = 4096  # the longest-lived


class StoreDown(Exception):
    """The store did not answer. One line for a person, without credentials."""


@dataclass(frozen=True, slots=True)
class WorkerKey:
    """One life of a worker."""

    worker_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Lease:
    """A worker that some router is connected to, and was told of other than by leases."""

    address: str
    worker_id: str
    epoch: int
    model: str


@dataclass(frozen=True, slots=True)
class Ask:
    """A request wants to be counted against its tenant's quotas."""

    router: str
    life: str
    tenant: str
    quotas: Quotas
    tokens: int  # most that it may use
    in_flight: int  # tokens that this router's other requests of the tenant may use, those that it asks for too
    # Of the requests that it asked for since it last asked for none: tokens of those that are known to be refused, and
    # so are not in flight. None: it asks for no other one.
    refused: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of it. `refusal` is None where it was counted."""

    refusal: Refusal | None
    used: Used  # fleet-wide, with this request where it was counted
    bucket: int  # of the store's time, that it was counted in


class LifeEnded(Exception):
    """The store has lost what it knew: nothing was counted."""


@dataclass(frozen=True, slots=True)
class WindowChange:
    """A correction, or something admitted while the store was not asked."""

    age_ms: int
    requests: int
    tokens: int
    bucket: int | None = None  # of the store's time, where that is known: what it takes back lies there


@dataclass(frozen=True, slots=True)
class Report:
    """What one router says."""

    router: str
    life: str  # "": it knows none yet
    number: int  # of this report; `windows` and `served` are counted once for each number, however often they come
    windows: Mapping[str, Sequence[WindowChange]] = field(default_factory=dict)  # by tenant
    in_flight: Mapping[str, int] = field(default_factory=dict)  # tokens by tenant; absolute
    served: Mapping[str, float] = field(default_factory=dict)  # cost units over weight, by tenant, since the last one
    credits: Mapping[WorkerKey, Credit] | None = None  # None: unchanged
    competing: Sequence[str] = ()  # tenants with open requests; goes with `credits`
    leases: Sequence[Lease] | None = None  # see Lease; None: nothing to renew now
    convictions: Mapping[bytes, int] = field(default_factory=dict)  # ms to live, by fingerprint
    known: Mapping[str, int] = field(default_factory=dict)  # versions of other routers' credits
    known_leases: int | None = None  # the version of them; None: nothing is known yet
    known_convictions: int | None = None
    wants_served: bool = False

    def aged(self, by_ms: int) -> "Report":
        """The same, sent again so much later."""
        windows = {
            tenant: [replace(change, age_ms=change.age_ms + by_ms) for change in changes]
            for tenant, changes in self.windows.items()
        }
        return replace(self, windows=windows)


@dataclass(frozen=True, slots=True)
class RouterNews:
    """What another router said last."""

    version: int
    credits: Mapping[WorkerKey, Credit]
    competing: Sequence[str]


@dataclass(frozen=True, slots=True)
class News:
    """What a router learns. Parts that it knows already are None."""

    life: str  # where it is not the report's, nothing was taken in, and everything else here is empty
    routers: Sequence[str] = ()  # the others that are alive
    changed: Mapping[str, RouterNews] = field(default_factory=dict)
    leases: Sequence[Lease] | None = None
    leases_version: int = 0
    convictions: Mapping[bytes, int] | None = None  # ms to live, by fingerprint
    convictions_version: int = 0
    convictions_count: int = 0  # that the store has
    served: Mapping[str, float] | None = None  # decayed, of the whole fleet
    read_s: float = 0.0  # that this router's loop spent on reading it


class Store(Protocol):
    """Neither call ever waits on its own for longer than a connection takes to break: callers bound their patience."""

    def reserve(self, ask: Ask) -> "asyncio.Future[Answer]":
        """Counts a request if its tenant's quotas allow it; one round trip. The future may be left alone: it still
        says what happened, whenever that is known. It fails with StoreDown or LifeEnded."""
        ...

    async def sync(self, report: Report) -> News:
        """Takes a report in and says what is new. Raises StoreDown."""
        ...

    async def connect(self) -> None:
        """Makes ready for calls, anew where that is needed. Raises StoreDown."""
        ...

    async def close(self) -> None: ...
