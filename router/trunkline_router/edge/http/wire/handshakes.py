"""The TLS handshakes in progress of an HTTP server, bounded in total.

A new handshake is never refused: at the limit an older one makes room. A client that means to connect needs a few round
trips, so handshakes that have been silent for longer go first, even if each comes from another host.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Protocol


class Pending(Protocol):
    """A handshake."""

    host: str  # of the client

    def drop(self) -> None:
        """Closes the connection at once."""


class Handshakes:
    """Counts handshakes, in total and by host."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._oldest_first: dict[Pending, None] = {}
        self._num_of_host: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._oldest_first)

    def __iter__(self) -> Iterator[Pending]:
        return iter(list(self._oldest_first))  # a copy

    def add(self, handshake: Pending) -> None:
        """Counts a new handshake. At the limit, drops the oldest one among those of the hosts that have the most."""
        if len(self) >= self.most:
            dropped = self._oldest_of_largest()
            self.remove(dropped)
            dropped.drop()
        self._oldest_first[handshake] = None
        self._num_of_host[handshake.host] += 1

    def remove(self, handshake: Pending) -> None:
        """Stops counting a handshake. Does nothing if it is not counted."""
        if handshake not in self._oldest_first:
            return
        del self._oldest_first[handshake]
        self._num_of_host[handshake.host] -= 1
        if not self._num_of_host[handshake.host]:
            del self._num_of_host[handshake.host]

    def _oldest_of_largest(self) -> Pending:
        largest = max(self._num_of_host.values())
        return next(each for each in self._oldest_first if self._num_of_host[each.host] == largest)
