"""A gRPC server that accepts several new calls in one turn of the event loop, and begins them fairly.

grpc.aio asks gRPC's core for one call and, when the event loop has it, for the next one. Between two calls lie two
wake-ups: of the thread that polls the core and of the event loop's thread. Where a client opens calls faster than that,
every client's calls wait in the core's queue, for wake-ups rather than for work. So several are asked for at a time.

To accept a call takes a tenth of the time that it takes to begin and end it. So calls are accepted at once, and begun
in turns of their hosts and connections: where one opens more of them than there is time for, its own calls wait.
"""

import asyncio
import time
from collections import OrderedDict, deque
from typing import Any, Generic, TypeVar

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # the stubs leave it out

from trunkline_runtime.log import get_logger

AT_ONCE = 32  # asked for at a time
BEGUN_IN_A_TURN = 16  # of the event loop, which sees to calls that run in between

# Calls that wait to be begun, each of which takes some 25 KiB. A connection has no more calls open than the first
# (MAX_STREAMS_PER_CONNECTION): where more of its calls wait, its client has cancelled some.
MAX_WAITING_OF_CONNECTION, MAX_WAITING = 1000, 8000
TOLD_EVERY_S = 10.0  # in the log, of calls that were dropped
DROPPED_TOGETHER = 1000  # to find the host and the connections with the most takes a while

_Core: Any = cygrpc.AioServer
_Call = TypeVar("_Call")


class ArrivedCalls(Generic[_Call]):
    """Calls that have been accepted and not begun. Hosts take turns, and so do the connections of a host.

    Where too many wait, calls are dropped: of the host with the most, the latest calls of its connections with the
    most.
    """

    def __init__(self) -> None:
        self._hosts: OrderedDict[str, _OfHost[_Call]] = OrderedDict()
        self._num_calls = 0

    def __len__(self) -> int:
        return self._num_calls

    def add(self, host: str, connection: str, call: _Call) -> int:
        """Returns how many calls were dropped for it, or 1 where it was dropped itself."""
        of_host = self._hosts.get(host)
        if of_host is None:
            of_host = self._hosts[host] = _OfHost()
        if not of_host.add(connection, call):
            return 1
        self._num_calls += 1
        if self._num_calls <= MAX_WAITING:
            return 0
        most = max(self._hosts, key=lambda host: self._hosts[host].num_calls)
        dropped = self._hosts[most].drop(DROPPED_TOGETHER)
        self._num_calls -= dropped
        if not self._hosts[most].num_calls:
            del self._hosts[most]
        return dropped

    def next(self) -> _Call:
        """The oldest one of the connection whose turn it is. Raises KeyError where none waits."""
        host, of_host = self._hosts.popitem(last=False)
        call = of_host.next()
        self._num_calls -= 1
        if of_host.num_calls:
            self._hosts[host] = of_host
        return call

    def clear(self) -> None:
        self._hosts.clear()
        self._num_calls = 0


class _OfHost(Generic[_Call]):
    """The calls of one host."""

    __slots__ = ("_by_connection", "num_calls")

    def __init__(self) -> None:
        self._by_connection: OrderedDict[str, deque[_Call]] = OrderedDict()
        self.num_calls = 0

    def add(self, connection: str, call: _Call) -> bool:
        """Whether there was room for it."""
        calls = self._by_connection.setdefault(connection, deque())
        if len(calls) == MAX_WAITING_OF_CONNECTION:
            return False
        calls.append(call)
        self.num_calls += 1
        return True

    def next(self) -> _Call:
        connection, calls = self._by_connection.popitem(last=False)
        call = calls.popleft()
        self.num_calls -= 1
        if calls:
            self._by_connection[connection] = calls
        return call

    def drop(self, count: int) -> int:
        """Drops at most so many, from the longest queues down; of equals, from those whose turn is the furthest off.
        Returns how many."""
        lengths = sorted(map(len, self._by_connection.values()), reverse=True)
        above = level = 0  # calls above a level
        for number, level in enumerate([*lengths[1:], 0], start=1):
            above += number * (lengths[number - 1] - level)
            if above >= count:
                level += (above - count) // number
                break
        dropped = 0
        for connection in list(reversed(self._by_connection)):
            calls = self._by_connection[connection]
            while len(calls) > level and dropped < count:
                calls.pop()
                dropped += 1
            if not calls:
                del self._by_connection[connection]
        self.num_calls -= dropped
        return dropped


class _EagerCore(_Core):  # type: ignore[misc]  # its type is known to Cython alone
    """Its main loop asks for a call by _request_call(), and has one that has arrived meanwhile."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._arrived: ArrivedCalls[Any] = ArrivedCalls()
        self._has_arrived = asyncio.Event()
        self._begun = 0  # in this turn of the event loop
        self._error: Exception | None = None
        self._num_dropped, self._told_s = 0, float("-inf")
        self._asking: set[asyncio.Task[None]] = set()

    async def _request_call(self) -> Any:
        while len(self._asking) < AT_ONCE and self._error is None:
            task = asyncio.create_task(self._ask_again_and_again())
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)
        if self._begun == BEGUN_IN_A_TURN:
            self._begun = 0
            await asyncio.sleep(0)
        while self._error is None and not self._arrived:
            self._begun = 0
            self._has_arrived.clear()
            await self._has_arrived.wait()
        if self._error is not None:
            raise self._error
        self._begun += 1
        return self._arrived.next()

    async def _ask_again_and_again(self) -> None:
        try:
            while self._error is None:
                self._add(await super()._request_call())
        except Exception as error:  # the server stops, and its main loop is told so
            self._error = error
            self._has_arrived.set()
        self._arrived.clear()  # calls that come while the server stops are refused

    def _add(self, call: Any) -> None:
        # gRPC cancels a call when the last reference to it is gone: to drop a call is to end it. So nothing else, not
        # even a variable of a task that waits for the next one, may refer to a call.
        connection: str = cygrpc._ServicerContext(call, None, None, None).peer()
        self._num_dropped += self._arrived.add(connection.rpartition(":")[0], connection, call)
        if self._num_dropped and time.monotonic() >= self._told_s + TOLD_EVERY_S:
            get_logger().warning("calls were dropped before they began", calls=self._num_dropped, of=connection)
            self._num_dropped, self._told_s = 0, time.monotonic()
        self._has_arrived.set()


def eager_server(**arguments: Any) -> grpc.aio.Server:
    """What grpc.aio.server() makes of the arguments, with a core that accepts AT_ONCE calls in a turn.

    A version of gRPC whose main loop asks in another way accepts as it always does.
    """
    cygrpc.AioServer = _EagerCore
    try:
        return grpc.aio.server(**arguments)
    finally:
        cygrpc.AioServer = _Core
