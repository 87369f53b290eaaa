"""What every call to a router passes before its request is looked at: how many there are, how many are read at once,
and how large they are."""

from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, AsyncExitStack
from typing import Any

import grpc

from trunkline_router.message_turns import MessageTurns, taken_in_turn
from trunkline_router.open_calls import MAX_CONNECTION_OTHER_CALLS, MAX_OTHER_CALLS, OpenCalls
from trunkline_router.pool import Pools
from trunkline_router.reading import Reading
from trunkline_router.request_size import SHAPES, UNSEEN_BYTES, RequestSize
from trunkline_router.tenants import tenant_of

Context = grpc.aio.ServicerContext[Any, Any]


class RequestGate:
    """One for all calls of a server.

    Requests count on the account of their tenant; those that name none on the account of the host that they come from,
    and while they are read on that of their connection.
    """

    def __init__(self, pools: Pools) -> None:
        self._size = RequestSize(pools)
        self._calls = OpenCalls()
        self._other_calls = OpenCalls(MAX_OTHER_CALLS, MAX_CONNECTION_OTHER_CALLS)
        self._reading = Reading()
        self._turns = MessageTurns()

    def enter(self, method: str, context: Context) -> "Passage":
        """A call that begins. Raises RequestRefused (OVERLOADED, INVALID_REQUEST)."""
        peer = context.peer()
        if method in SHAPES:
            tenant, calls = tenant_of(context.invocation_metadata()), self._calls
            account, sender = tenant or host_of(peer), tenant or peer
        else:
            account, sender, calls = peer, peer, self._other_calls
        calls.open(account)
        return Passage(method, account, sender, calls, self._reading, self._turns, self._size)


class Passage:
    """One call's way through the gate."""

    __slots__ = ("_account", "_calls", "_has_first", "_held", "_method", "_reading", "_sender", "_size", "_turns")

    def __init__(
        self,
        method: str,
        account: str,
        sender: str,
        calls: OpenCalls,
        reading: Reading,
        turns: MessageTurns,
        size: RequestSize,
    ) -> None:
        self._method, self._account, self._sender = method, account, sender
        self._calls, self._reading, self._turns, self._size = calls, reading, turns, size
        self._held: AbstractContextManager[None] | None = None
        self._has_first = False

    async def read(self, context: Context) -> Any:
        """The bytes of the call's next message; grpc.aio.EOF where it sends none. Raises RequestRefused where they are
        not worth parsing, where there are too many in memory, and where the first ones do not come."""
        self.answer_begins()  # what was read before has been looked at
        raw = await (self._read_next(context) if self._has_first else self._read_first(context))
        self._has_first = True
        if raw is not grpc.aio.EOF and len(raw) > UNSEEN_BYTES:
            held = self._size.holding(len(raw), self._account)
            held.__enter__()
            self._held = held
            await self._size.check(self._method, raw)
        return raw

    async def _read_first(self, context: Context) -> Any:
        async with self._reading.place(self._sender) as arrived:

            async def turn() -> None:
                arrived()
                await self._turns.turn(self._account)

            return await self._taken(context, turn)

    async def _read_next(self, context: Context) -> Any:
        """It comes when its client has something to say, so it takes a place when it has arrived."""
        async with AsyncExitStack() as stack:

            async def turn() -> None:
                arrived = await stack.enter_async_context(self._reading.place(self._sender))
                arrived()
                await self._turns.turn(self._account)

            return await self._taken(context, turn)

    async def _taken(self, context: Context, turn: Callable[[], Coroutine[Any, Any, None]]) -> Any:
        num_bytes = 0
        try:
            raw: Any = await taken_in_turn(context.read(), turn)
            num_bytes = 0 if raw is grpc.aio.EOF else len(raw)
        finally:
            self._turns.took(self._account, num_bytes)
        return raw

    def answer_begins(self) -> None:
        """The request counts no more against the memory for requests: the capacity of what answers bounds those that
        are being answered."""
        if self._held is not None:
            self._held.__exit__(None, None, None)
            self._held = None

    def leave(self) -> None:
        """The call has ended."""
        self.answer_begins()
        self._calls.close(self._account)


def host_of(peer: str) -> str:
    """Where a call comes from, without its port: "ipv4:10.0.0.1"."""
    return peer.rpartition(":")[0]
