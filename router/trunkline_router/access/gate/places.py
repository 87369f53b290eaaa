"""Places: what senders hold of something that is bounded, such as open requests or the bytes of large ones.

A tenant, a connection and a host may hold less than all senders together, so that each of them leaves places to others.
If the places of a host, or all places, are taken, the largest holder loses its oldest one: the host that holds most,
and on it the connection that holds most. A newcomer is refused only if it would then hold more than the one that loses.
So a client that invents tenants or opens many connections does not displace a client that holds little.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from trunkline.status import CODE_RESOURCE_EXHAUSTED, OVERLOADED, RequestRefused
from trunkline_router.address import host_of

MAX_CALLS, MAX_TENANT_CALLS = 8192, 4096  # open requests in total, and of one tenant
RETRY_MS = 1000

GiveUp = Callable[[RequestRefused], object]


class Sender(NamedTuple):
    """Names the sender of a call, as far as a router can tell."""

    host: str  # "ipv4:10.0.0.1"
    connection: str  # "ipv4:10.0.0.1:50312"; over HTTP all connections of a host's tenant count as one
    tenant: str = ""  # "" if the call names none

    @property
    def account(self) -> str:
        """Names a tenant on a host across all its connections, which share the time of one event loop."""
        return f"{self.host} {self.tenant}"


def sender_of(peer: str, tenant: str = "") -> Sender:
    """The sender behind a gRPC peer address, such as "ipv4:10.0.0.1:50312"."""
    return Sender(host_of(peer), peer, tenant)


def http_sender_of(peer: str, tenant: str = "") -> Sender:
    """The sender of an HTTP request. A connection carries one request at a time, so clients open as many as they like;
    those of a tenant on a host therefore count as one."""
    host = host_of(peer)
    return Sender(host, f"{host} {tenant} over HTTP", tenant)


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much may be held. `of_host` is high because a gateway is one host with many tenants, but less than `in_all`.

    of_tenant: does not apply to calls without a tenant
    spare: the last places, of a host and of all, are for connections that hold none
    """

    in_all: int
    of_host: int
    of_connection: int
    of_tenant: int
    spare: int = 0


def request_bounds(in_all: int, of_tenant: int) -> Bounds:
    """The bounds on open requests. A call takes some 40 KiB before its message is read, 75 KiB with a full window."""
    return Bounds(in_all, max(1, in_all * 7 // 8), in_all, of_tenant)


# Bytes on the wire of large requests whose answers have not begun. In memory they take three or four times as much.
# Requests being answered do not count: workers bound their number, and long contexts are normal.
BYTE_BOUNDS = Bounds(in_all=128 << 20, of_host=112 << 20, of_connection=96 << 20, of_tenant=48 << 20)
# Health watches, reflection and other calls that are not requests.
WATCH_BOUNDS = Bounds(in_all=2048, of_host=1024, of_connection=64, of_tenant=2048)
# Health checks, which are answered as soon as their messages have arrived.
CHECK_BOUNDS = Bounds(in_all=1024, of_host=512, of_connection=256, of_tenant=1024)


@dataclass(slots=True, eq=False)
class Place:
    """What a call holds. `give_up` ends the call with a refusal."""

    sender: Sender
    give_up: GiveUp
    amount: int
    is_held: bool = True
    may_be_given_up: bool = False


class Places:
    """All places of one kind, which `what` names in refusals."""

    def __init__(self, bounds: Bounds, what: str) -> None:
        self._bounds = bounds
        self._what = what
        self.num_held = 0
        self._of_host: Counter[str] = Counter()
        self._of_connection: Counter[str] = Counter()
        self._of_tenant: Counter[str] = Counter()
        # What may be given up: the places by host and connection, the oldest first, and their amounts.
        self._loose: dict[str, dict[str, dict[Place, None]]] = {}
        self._loose_of_host: Counter[str] = Counter()
        self._loose_of_connection: Counter[str] = Counter()

    def take(self, sender: Sender, give_up: GiveUp, amount: int = 1) -> Place:
        """Returns a place, which release() must end. Raises RequestRefused (OVERLOADED)."""
        host, connection, tenant = sender
        bounds, mine = self._bounds, self._of_connection[connection]
        if tenant and self._of_tenant[tenant] + amount > bounds.of_tenant:
            raise self._refusal(" of this tenant")
        if mine + amount > bounds.of_connection:
            raise self._refusal(" of this connection")
        spare = bounds.spare if mine else 0
        while self._of_host[host] + amount > bounds.of_host - spare:
            self._make_room(sender, amount, (host,))
        while self.num_held + amount > bounds.in_all - spare:
            self._make_room(sender, amount, self._loose)
        self._count(sender, amount)
        return Place(sender, give_up, amount)

    def fits(self, sender: Sender) -> bool:
        """Whether the sender can take a place without displacing another."""
        host, connection, tenant = sender
        bounds, mine = self._bounds, self._of_connection[connection]
        spare = bounds.spare if mine else 0
        return (
            self.num_held < bounds.in_all - spare
            and self._of_host[host] < bounds.of_host - spare
            and mine < bounds.of_connection
            and (not tenant or self._of_tenant[tenant] < bounds.of_tenant)
        )

    def loosen(self, place: Place) -> None:
        """Lets the place be given up for others."""
        if place.is_held and not place.may_be_given_up:
            place.may_be_given_up = True
            host, connection, _ = place.sender
            self._loose.setdefault(host, {}).setdefault(connection, {})[place] = None
            self._count_loose(place.sender, place.amount)

    def keep(self, place: Place) -> None:
        """Protects the place from being given up."""
        if place.may_be_given_up:
            place.may_be_given_up = False
            host, connection, _ = place.sender
            of_host = self._loose[host]
            del of_host[connection][place]
            if not of_host[connection]:
                del of_host[connection]
            if not of_host:
                del self._loose[host]
            self._count_loose(place.sender, -place.amount)

    def release(self, place: Place) -> None:
        """Frees the place. Does nothing if it was given up."""
        if place.is_held:
            self.keep(place)
            place.is_held = False
            self._count(place.sender, -place.amount)

    def _count(self, sender: Sender, amount: int) -> None:
        self.num_held += amount
        _add(self._of_host, sender.host, amount)
        _add(self._of_connection, sender.connection, amount)
        _add(self._of_tenant, sender.tenant, amount)

    def _count_loose(self, sender: Sender, amount: int) -> None:
        _add(self._loose_of_host, sender.host, amount)
        _add(self._loose_of_connection, sender.connection, amount)

    def _make_room(self, newcomer: Sender, amount: int, hosts: Iterable[str]) -> None:
        """Gives up the oldest place of the largest holder on one of these hosts. Raises RequestRefused if the newcomer
        would hold more than that."""
        of_host, of_connection = self._loose_of_host, self._loose_of_connection
        host = max(hosts, key=of_host.__getitem__, default=newcomer.host)
        if of_host[host] < of_host[newcomer.host] + amount:
            host = newcomer.host
        connections = self._loose.get(host)
        if connections is None:
            raise self._refusal()
        most = max(connections, key=of_connection.__getitem__)
        if host == newcomer.host and of_connection[most] < of_connection[newcomer.connection] + amount:
            raise self._refusal()
        oldest = next(iter(connections[most]))
        self.release(oldest)
        oldest.give_up(self._refusal(", and another client has fewer"))

    def _refusal(self, reason: str = "") -> RequestRefused:
        return RequestRefused(
            CODE_RESOURCE_EXHAUSTED, OVERLOADED, f"too many {self._what}{reason}", retry_delay_ms=RETRY_MS
        )


def _add(counts: Counter[str], name: str, amount: int) -> None:
    counts[name] += amount
    if not counts[name]:
        del counts[name]
