"""Bounds how many calls of a kind may be open at once: per connection, per host, and in all."""

from collections import Counter
from dataclasses import dataclass

from trunkline.status import CODE_RESOURCE_EXHAUSTED, OVERLOADED, RequestRefused

RETRY_MS = 1000


@dataclass(frozen=True, slots=True)
class Bounds:
    """Most open calls. A host may have many connections, and must leave room for the calls of other hosts."""

    per_connection: int
    per_host: int
    in_all: int


class Places:
    """Counts open calls by their peers, as gRPC names them: `ipv4:10.0.0.7:50312`."""

    def __init__(self, what: str, bounds: Bounds) -> None:
        self._what = what
        self._bounds = bounds
        self._taken: Counter[str] = Counter()  # by connection, and by host
        self.num_taken = 0

    def take(self, peer: str) -> None:
        """Counts one more open call of this peer. Raises RequestRefused (OVERLOADED) if a bound is reached."""
        bounds, host = self._bounds, host_of(peer)
        for taken, most, whose in (
            (self._taken[peer], bounds.per_connection, "of one connection"),
            (self._taken[host], bounds.per_host, "of one host"),
            (self.num_taken, bounds.in_all, "in all"),
        ):
            if taken >= most:
                message = f"this worker has {taken} open {self._what} {whose}, which is its limit"
                raise RequestRefused(CODE_RESOURCE_EXHAUSTED, OVERLOADED, message, retry_delay_ms=RETRY_MS)
        self._taken[peer] += 1
        self._taken[host] += 1
        self.num_taken += 1

    def give_back(self, peer: str) -> None:
        """Counts one open call less. The peer must have taken a place."""
        self.num_taken -= 1
        for name in (peer, host_of(peer)):
            self._taken[name] -= 1
            if not self._taken[name]:
                del self._taken[name]


def host_of(peer: str) -> str:
    """Returns the peer without its port."""
    return peer.rpartition(":")[0]
