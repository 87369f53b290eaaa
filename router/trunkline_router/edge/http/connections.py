"""The established connections of an HTTP server, bounded in total and by host.

At a limit, the host with the most connections loses the one that has made no progress for longest, of those on which no
request is being answered. So a client that opens thousands of connections cannot keep others out, whether or not it
reads its answers.
"""

import asyncio
from collections.abc import Iterator
from typing import Protocol

HOST_SHARE = 7 / 8  # of all connections that one host may have: a gateway is one host, but others need room
SCANNED = 64  # connections looked at for one that may be closed: bounds the time that a new connection takes


class Counted(Protocol):
    """A connection."""

    host: str  # of the client

    def is_busy(self) -> bool:
        """Whether a request is being answered: such a connection is never closed for another one."""

    def drop(self) -> None:
        """Closes the connection at once."""

    def overdue(self, now_s: float) -> None:
        """Ends the connection if the client has taken too long."""

    def shutdown(self) -> None:
        """Closes the connection, after the response that is being sent."""


class Connections:
    """Counts connections by host."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._of_host: dict[str, dict[Counted, None]] = {}  # longest without progress first
        self._num = 0
        self._closed = asyncio.Event()
        self._closed.set()

    async def all_closed(self) -> None:
        """Returns once there is no connection."""
        await self._closed.wait()

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[Counted]:
        return iter([connection for of_host in self._of_host.values() for connection in of_host])  # a copy

    def add(self, connection: Counted) -> bool:
        """Counts a new connection, and drops another one if a limit is reached. Returns False if the new connection
        must be dropped itself, because its host has the most or no other connection is idle."""
        of_host = self._of_host.get(connection.host, {})
        if len(of_host) >= max(1, int(self.most * HOST_SHARE)):
            if not self._drop_idle(of_host):
                return False
        elif self._num >= self.most:
            largest = max(self._of_host.values(), key=len)
            if len(largest) <= len(of_host) + 1 or not self._drop_idle(largest):
                return False
        self._of_host.setdefault(connection.host, {})[connection] = None
        self._num += 1
        self._closed.clear()
        return True

    def used(self, connection: Counted) -> None:
        """Records that the connection makes progress: it becomes the last of its host to be dropped."""
        of_host = self._of_host.get(connection.host)
        if of_host is not None and connection in of_host:
            del of_host[connection]
            of_host[connection] = None

    def remove(self, connection: Counted) -> None:
        """Stops counting a connection. Does nothing if it is not counted."""
        of_host = self._of_host.get(connection.host)
        if of_host is None or connection not in of_host:
            return
        del of_host[connection]
        self._num -= 1
        if not self._num:
            self._closed.set()
        if not of_host:
            del self._of_host[connection.host]

    def _drop_idle(self, of_host: dict[Counted, None]) -> bool:
        for connection in _first(of_host, SCANNED):
            if connection.is_busy():
                self.used(connection)
            else:
                self.remove(connection)
                connection.drop()
                return True
        return False


def _first(connections: dict[Counted, None], most: int) -> list[Counted]:
    return [connection for connection, _ in zip(connections, range(most), strict=False)]
