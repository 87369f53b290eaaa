"""The established connections of an HTTP server, bounded in total and by host.

At a limit, the host with the most connections loses the one that has made no progress for longest, of those on which no
request is being answered. So a client that opens thousands of connections cannot keep others out, whether or not it
reads its answers.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

HOST_SHARE = 7 / 8  # of all connections that one host may have: a gateway is one host, but others need room


class Counted(Protocol):
    """A connection."""

    host: str  # of the client

    def is_busy(self) -> bool:
        """Whether a request is being answered: such a connection is never closed for another one. When it is no longer
        busy, used() must be called."""

    def drop(self) -> None:
        """Closes the connection at once."""

    def overdue(self, now_s: float) -> None:
        """Ends the connection if the client has taken too long."""

    def shutdown(self) -> None:
        """Closes the connection, after the response that is being sent."""


@dataclass(slots=True)
class _Host:
    """The connections of one host.

    idle: longest without progress first. A busy connection is removed when it is met here, and added again when it is
    no longer busy: so it is met at most once a request.
    """

    connections: set[Counted] = field(default_factory=set)
    idle: OrderedDict[Counted, None] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self.connections)


class Connections:
    """Counts connections by host."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._hosts: dict[str, _Host] = {}
        self._num = 0
        self._closed = asyncio.Event()
        self._closed.set()

    async def all_closed(self) -> None:
        """Returns once there is no connection."""
        await self._closed.wait()

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[Counted]:
        return iter([connection for host in self._hosts.values() for connection in host.connections])  # a copy

    def add(self, connection: Counted) -> bool:
        """Counts a new connection, and drops another one if a limit is reached. Returns False if the new connection
        must be dropped itself, because its host has the most or no other connection is idle."""
        host = self._hosts.get(connection.host) or _Host()
        if len(host) >= max(1, int(self.most * HOST_SHARE)):
            if not self._drop_idle(host):
                return False
        elif self._num >= self.most:
            largest = max(self._hosts.values(), key=len)
            if len(largest) <= len(host) + 1 or not self._drop_idle(largest):
                return False
        self._hosts[connection.host] = host  # dropping its last connection may have removed it
        host.connections.add(connection)
        host.idle[connection] = None
        self._num += 1
        self._closed.clear()
        return True

    def used(self, connection: Counted) -> None:
        """Records that the connection makes progress, or is no longer busy: it becomes the last of its host to be
        dropped."""
        host = self._hosts.get(connection.host)
        if host is not None and connection in host.connections:
            host.idle[connection] = None
            host.idle.move_to_end(connection)

    def remove(self, connection: Counted) -> None:
        """Stops counting a connection. Does nothing if it is not counted."""
        host = self._hosts.get(connection.host)
        if host is None or connection not in host.connections:
            return
        host.connections.remove(connection)
        host.idle.pop(connection, None)
        self._num -= 1
        if not self._num:
            self._closed.set()
        if not host.connections:
            del self._hosts[connection.host]

    def _drop_idle(self, host: _Host) -> bool:
        while host.idle:
            connection, _ = host.idle.popitem(last=False)
            if not connection.is_busy():
                self.remove(connection)
                connection.drop()
                return True
        return False
