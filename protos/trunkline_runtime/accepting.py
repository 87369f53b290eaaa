"""A gRPC server that accepts several new calls in one turn of the event loop, and begins them fairly.

grpc.aio asks gRPC's core for one call and, when the event loop has it, for the next one. Between two calls lie two
wake-ups: of the thread that polls the core and of the event loop's thread. Where a client opens calls faster than that,
every client's calls wait in the core's queue, for wake-ups rather than for work. So several are asked for at a time.

To accept a call takes a tenth of the time that it takes to begin and end it. So calls are accepted at once, and begun
in turns of their connections: where a connection opens more of them than there is time for, its own calls wait.
"""

import asyncio
from collections import OrderedDict, deque
from typing import Any, Generic, TypeVar

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # the stubs leave it out

AT_ONCE = 32  # asked for at a time
BEGUN_IN_A_TURN = 16  # of the event loop, which sees to calls that run in between

# Calls that wait to be begun. A connection has no more calls open than the first (MAX_STREAMS_PER_CONNECTION): where
# more of its calls wait, its client has cancelled some.
MAX_WAITING_OF_CONNECTION, MAX_WAITING = 1000, 4000

_Core: Any = cygrpc.AioServer
_Call = TypeVar("_Call")


class ArrivedCalls(Generic[_Call]):
    """Calls that have been accepted and not begun. Each connection has its turn."""

    def __init__(self) -> None:
        self._by_connection: OrderedDict[str, deque[_Call]] = OrderedDict()
        self._num_calls = 0

    def __len__(self) -> int:
        return self._num_calls

    def add(self, connection: str, call: _Call) -> None:
        """Where too many wait, the oldest ones of the connection with the most are dropped."""
        calls = self._by_connection.setdefault(connection, deque())
        calls.append(call)
        self._num_calls += 1
        if len(calls) > MAX_WAITING_OF_CONNECTION:
            self._drop(connection, 1)
        elif self._num_calls > MAX_WAITING:
            most = max(self._by_connection, key=lambda connection: len(self._by_connection[connection]))
            self._drop(most, (len(self._by_connection[most]) + 1) // 2)  # half of them: to find them takes a while

    def next(self) -> _Call:
        """The oldest one of the connection whose turn it is. Raises KeyError where none waits."""
        connection, calls = self._by_connection.popitem(last=False)
        call = calls.popleft()
        self._num_calls -= 1
        if calls:
            self._by_connection[connection] = calls
        return call

    def clear(self) -> None:
        self._by_connection.clear()
        self._num_calls = 0

    def _drop(self, connection: str, count: int) -> None:
        calls = self._by_connection[connection]
        for _ in range(count):
            calls.popleft()
        self._num_calls -= count
        if not calls:
            del self._by_connection[connection]


class _EagerCore(_Core):  # type: ignore[misc]  # its type is known to Cython alone
    """Its main loop asks for a call by _request_call(), and has one that has arrived meanwhile."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._arrived: ArrivedCalls[Any] = ArrivedCalls()
        self._has_arrived = asyncio.Event()
        self._begun = 0  # in this turn of the event loop
        self._error: Exception | None = None
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
        self._arrived.add(_connection_of(call), call)
        self._has_arrived.set()


def _connection_of(call: Any) -> str:
    peer: str = cygrpc._ServicerContext(call, None, None, None).peer()
    return peer


def eager_server(**arguments: Any) -> grpc.aio.Server:
    """What grpc.aio.server() makes of the arguments, with a core that accepts AT_ONCE calls in a turn.

    A version of gRPC whose main loop asks in another way accepts as it always does.
    """
    cygrpc.AioServer = _EagerCore
    try:
        return grpc.aio.server(**arguments)
    finally:
        cygrpc.AioServer = _Core
