"""The values that a store of shared state takes and returns.

A store has two main calls: `reserve`, on the path of a request, and `sync`, in the background, which sends one router's
report and returns what the other routers reported. Every value in a report is absolute (credits), counted once
(`Report.number`), or sent again in full when the store has lost it.

A store has a **life**: a random name that it gets when it is found empty, or when it may have lost state (another
process that started from an older snapshot). A report for another life is ignored. The router learns the current life
and sends its part of the state again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trunkline_router.quotas.quota import Quotas, Refusal, Used
from trunkline_router.routing.credit import Credit

PATIENCE_S = 0.005  # how long a request waits for the store
TTL_MS = 3_000  # a router that sends no report for this long is considered dead
KEEP_MS = 600_000  # how long the number of a router's last counted report is kept
MAX_CONVICTIONS = 4096  # those that expire last are kept


class StoreDown(Exception):
    """The store did not answer. The message is one line for people, without credentials."""


@dataclass(frozen=True, slots=True)
class WorkerKey:
    """One life of a worker, from its start to its end."""

    worker_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Lease:
    """A worker that some router is connected to and knows from a source other than leases."""

    address: str
    worker_id: str
    epoch: int
    model: str


@dataclass(frozen=True, slots=True)
class Ask:
    """Asks to count one request against its tenant's quotas."""

    router: str
    life: str
    tenant: str
    quotas: Quotas
    tokens: int  # the most that the request may use
    in_flight_change: int  # of the router's other requests of the tenant: what it has not told yet


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of an Ask. `refusal` is None if the request was counted."""

    refusal: Refusal | None
    used: Used  # fleet-wide, including this request if it was counted
    bucket: int  # number of the bucket in which it was counted, by the store's time


@dataclass(frozen=True, slots=True)
class WindowChange:
    """A correction to a tenant's window, or a request that was admitted without asking the store."""

    at_ms: float  # by the clock of Report.sent_ms
    requests: int
    tokens: int
    bucket: int | None = None  # by the store's time if known: the bucket from which a correction subtracts


@dataclass(frozen=True, slots=True)
class TenantReport:
    """What a router has to tell of a tenant."""

    changes: Sequence[WindowChange]
    in_flight_change: int  # of the tokens that its running requests may use: what was not told in an Ask
    in_flight: int | None  # those tokens; None: not known, because the store is being asked for others


@dataclass(frozen=True, slots=True)
class Report:
    """The state of one router, and the versions that it knows of the others'."""

    router: str
    life: str  # "" if the router knows none yet
    number: int  # of this report; changes and `served` are counted once per number, however often it is sent
    sent_ms: float = 0.0  # by the router's clock, this time
    tenants: Mapping[str, TenantReport] = field(default_factory=dict)
    served: Mapping[str, float] = field(default_factory=dict)  # cost units over weight by tenant since the last report
    credits: Mapping[WorkerKey, Credit] | None = None  # None: unchanged
    competing: Sequence[str] = ()  # tenants with open requests; sent with `credits`
    leases: Sequence[Lease] | None = None  # to renew; None: none now
    convictions: Mapping[bytes, int] = field(default_factory=dict)  # ms to live by fingerprint
    known: Mapping[str, int] = field(default_factory=dict)  # known versions of other routers' credits, by router
    known_leases: int | None = None  # known version; None: none
    known_convictions: int | None = None
    wants_served: bool = False


@dataclass(frozen=True, slots=True)
class NeighbourReport:
    """The last credits and competing tenants that another router reported."""

    version: int
    credits: Mapping[WorkerKey, Credit]
    competing: Sequence[str]


@dataclass(frozen=True, slots=True)
class SyncReply:
    """The store's answer to a report. Parts that the router knows already are None."""

    life: str  # if it differs from the report's, the report was ignored and all other fields are empty
    routers: Sequence[str] = ()  # the other routers that are alive
    changed: Mapping[str, NeighbourReport] = field(default_factory=dict)
    leases: Sequence[Lease] | None = None
    leases_version: int = 0
    convictions: Mapping[bytes, int] | None = None  # ms to live by fingerprint
    convictions_version: int = 0
    served: Mapping[str, float] | None = None  # decayed, of the whole fleet
    read_s: float = 0.0  # time that this router's event loop spent decoding the answer
