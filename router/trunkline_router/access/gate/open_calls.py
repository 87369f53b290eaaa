"""Limits on open calls: per tenant, per connection, per host, and in total.

When a host or the router is at its limit, the largest holder loses a call: the host with the most calls, and on it the
connection with the most. A new call is refused only if it belongs to that connection itself. So a client that invents
tenants or opens many connections cannot displace a client that has few calls.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from trunkline.status import CODE_RESOURCE_EXHAUSTED, OVERLOADED, RequestRefused
from trunkline_router.access.gate.ranking import Ranking
from trunkline_router.access.gate.sender import Sender

MAX_CALLS, MAX_TENANT_CALLS = 8192, 4096  # open requests in total, and of one tenant
RETRY_MS = 1000


@dataclass(frozen=True, slots=True)
class CallBounds:
    """Largest numbers of open calls. `of_host` is high because a gateway is one host with many tenants, but less than
    `in_all` because a host must leave room for others."""

    in_all: int
    of_host: int
    of_connection: int
    of_tenant: int  # does not apply to calls without a tenant


def request_bounds(in_all: int, of_tenant: int) -> CallBounds:
    """The limits for requests. A call takes some 40 KiB before its message is read, and 75 KiB with a full window."""
    return CallBounds(in_all, max(1, in_all * 7 // 8), in_all, of_tenant)


# Health watches and, counted separately, reflection and other calls that are not requests.
WATCH_BOUNDS = CallBounds(in_all=2048, of_host=1024, of_connection=64, of_tenant=2048)
# Health checks, which are answered as soon as their messages have arrived.
CHECK_BOUNDS = CallBounds(in_all=1024, of_host=512, of_connection=256, of_tenant=1024)


class OpenCall:
    """One call. `give_up` ends it with a refusal."""

    __slots__ = ("give_up", "is_open", "may_be_given_up", "sender")

    def __init__(self, sender: Sender, give_up: Callable[[RequestRefused], object]) -> None:
        self.sender = sender
        self.give_up = give_up
        self.is_open = self.may_be_given_up = False


class OpenCalls:
    """Counts the open calls of one kind, which `what` names in refusals."""

    def __init__(self, bounds: CallBounds, what: str = "calls") -> None:
        self._bounds = bounds
        self._what = what
        self._hosts: Counter[str] = Counter()
        self._connections: Counter[str] = Counter()
        self._tenants: Counter[str] = Counter()
        self.num_open = 0
        # Calls that may be given up: counts by host, counts by host and connection, and the calls, oldest first.
        self._evictable = Ranking()
        self._evictable_of_host: dict[str, Ranking] = {}
        self._evictable_of_connection: dict[str, dict[OpenCall, None]] = {}

    def open(self, call: OpenCall) -> None:
        """Counts a call; close() must follow. Raises RequestRefused (OVERLOADED) if a limit is reached and the call's
        sender has the most calls."""
        sender, bounds = call.sender, self._bounds
        if sender.tenant and self._tenants[sender.tenant] >= bounds.of_tenant:
            raise self._refusal(f"this tenant has {bounds.of_tenant}")
        if self._connections[sender.connection] >= bounds.of_connection:
            raise self._refusal(f"this connection has {bounds.of_connection}")
        if self._hosts[sender.host] >= bounds.of_host:
            self._make_room(sender, sender.host)
        elif self.num_open >= bounds.in_all:
            most = self._evictable.first()
            if most is None or self._evictable[sender.host] >= self._evictable[most]:
                most = sender.host
            self._make_room(sender, most)
        self._count(call)

    def open_in_any_case(self, call: OpenCall) -> None:
        """Counts a call and never refuses it. At a limit, gives up the oldest call of the same connection, or of the
        connection with the most calls on the host with the most."""
        sender, bounds = call.sender, self._bounds
        if self._connections[sender.connection] >= bounds.of_connection:
            self._give_up_oldest(sender.connection)
        elif self._hosts[sender.host] >= bounds.of_host:
            self._give_up_oldest(self._evictable_of_host[sender.host].first())
        elif self.num_open >= bounds.in_all:
            self._give_up_oldest(self._evictable_of_host[self._evictable.first() or ""].first())
        self._count(call)

    def keep(self, call: OpenCall) -> None:
        """Protects the call from being given up."""
        if not call.may_be_given_up:
            return
        call.may_be_given_up = False
        host, connection = call.sender.host, call.sender.connection
        self._evictable.remove(host)
        connections = self._evictable_of_host[host]
        connections.remove(connection)
        if not connections:
            del self._evictable_of_host[host]
        calls = self._evictable_of_connection[connection]
        del calls[call]
        if not calls:
            del self._evictable_of_connection[connection]

    def close(self, call: OpenCall) -> None:
        """Stops counting a call that has ended. Does nothing if the call was given up."""
        if not call.is_open:
            return
        self.keep(call)
        call.is_open = False
        self.num_open -= 1
        for counts, name in self._counts(call.sender):
            counts[name] -= 1
            if not counts[name]:
                del counts[name]

    def _count(self, call: OpenCall) -> None:
        call.is_open = call.may_be_given_up = True
        self.num_open += 1
        for counts, name in self._counts(call.sender):
            counts[name] += 1
        host, connection = call.sender.host, call.sender.connection
        self._evictable.add(host)
        self._evictable_of_host.setdefault(host, Ranking()).add(connection)
        self._evictable_of_connection.setdefault(connection, {})[call] = None

    def _counts(self, sender: Sender) -> list[tuple[Counter[str], str]]:
        counts = [(self._hosts, sender.host), (self._connections, sender.connection)]
        return [*counts, (self._tenants, sender.tenant)] if sender.tenant else counts

    def _make_room(self, newcomer: Sender, host: str) -> None:
        """Gives up a call of this host. Raises RequestRefused if the newcomer's connection has the most calls."""
        connections = self._evictable_of_host.get(host)
        most = None if connections is None else connections.first()
        if connections is None or most is None or connections[most] <= connections[newcomer.connection] + 1:
            raise self._refusal(f"{self.num_open} are open")
        self._give_up_oldest(most)

    def _give_up_oldest(self, connection: str | None) -> None:
        oldest = next(iter(self._evictable_of_connection[connection or ""]))
        self.close(oldest)
        oldest.give_up(self._refusal("another client has fewer"))

    def _refusal(self, reason: str) -> RequestRefused:
        message = f"too many {self._what} are open already: {reason}"
        return RequestRefused(CODE_RESOURCE_EXHAUSTED, OVERLOADED, message, retry_delay_ms=RETRY_MS)
