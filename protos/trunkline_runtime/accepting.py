"""A gRPC server that accepts several new calls in one turn of the event loop, and starts them fairly.

grpc.aio requests one call from gRPC's core, and requests the next one when the event loop has it. Each call costs two
wake-ups: of the thread that polls the core, and of the event loop's thread. If a client opens calls faster than that,
the calls of all clients wait in the core's queue, although the server is idle. So this server requests several calls
at a time.

Accepting a call takes a tenth of the time of starting and ending it. So calls are accepted immediately, and started in
turn by host and connection: a client that opens more calls than the server can start only delays its own calls.
"""

import asyncio
import time
from collections import OrderedDict, deque
from typing import Any, Generic, TypeVar

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # the stubs leave it out

from trunkline_runtime.log import get_logger

AT_ONCE = 32  # calls requested from the core at a time
BEGUN_IN_A_TURN = 16  # calls started in one turn of the event loop, which serves running calls between turns

# Accepted calls that were not started yet; each takes about 25 KiB. The first number is also the most calls that a
# connection may have open (MAX_STREAMS_PER_CONNECTION): if more of them wait, the client has cancelled some.
MAX_WAITING_OF_CONNECTION, MAX_WAITING = 1000, 8000
TOLD_EVERY_S = 10.0  # interval of log lines about dropped calls
DROPPED_TOGETHER = 1000  # finding the host and the connections with the most calls takes a while

_Core: Any = cygrpc.AioServer
_Call = TypeVar("_Call")


class ArrivedCalls(Generic[_Call]):
    """Calls that were accepted but not started. Hosts take turns, and so do the connections of a host.

    If too many calls wait, some are dropped: the latest ones on the connections with the most calls, of the host with
    the most calls.
    """

    def __init__(self) -> None:
        self._hosts: OrderedDict[str, _OfHost[_Call]] = OrderedDict()
        self._num_calls = 0

    def __len__(self) -> int:
        return self._num_calls

    def add(self, host: str, connection: str, call: _Call) -> int:
        """Adds a call; returns how many calls were dropped, which may be this one."""
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
        """Removes and returns the oldest call of the connection whose turn it is. Raises KeyError if there is none."""
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
        """Adds a call; returns False if there is no room for it."""
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
        """Drops at most `count` calls from the longest queues; of equal queues, from those whose turn comes last.
        Returns the number of calls dropped."""
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


class _EagerCore(_Core):  # type: ignore[misc]  # a Cython type without stubs
    """A core whose main loop gets calls that have already arrived when it calls _request_call()."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._arrived: ArrivedCalls[Any] = ArrivedCalls()
        self._has_arrived = asyncio.Event()
        self._begun = 0  # calls started in this turn of the event loop
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
        except Exception as error:  # the server is stopping: the main loop must see the error
            self._error = error
            self._has_arrived.set()
        self._arrived.clear()  # calls that arrive while the server stops are refused

    def _add(self, call: Any) -> None:
        # gRPC cancels a call when its last reference is gone, so dropping a call ends it. Nothing else may refer to a
        # call, not even a variable of a task that waits for the next one.
        connection: str = cygrpc._ServicerContext(call, None, None, None).peer()
        self._num_dropped += self._arrived.add(connection.rpartition(":")[0], connection, call)
        if self._num_dropped and time.monotonic() >= self._told_s + TOLD_EVERY_S:
            get_logger().warning("calls were dropped before they began", calls=self._num_dropped, of=connection)
            self._num_dropped, self._told_s = 0, time.monotonic()
        self._has_arrived.set()


def eager_server(**arguments: Any) -> grpc.aio.Server:
    """Returns grpc.aio.server(**arguments) with a core that accepts AT_ONCE calls in a turn.

    With a version of gRPC whose main loop requests calls in another way, the server accepts calls as gRPC does.
    """
    cygrpc.AioServer = _EagerCore
    try:
        return grpc.aio.server(**arguments)
    finally:
        cygrpc.AioServer = _Core
