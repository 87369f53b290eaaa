"""What every call to a router passes before its request is looked at: how many there are, how many are read at once,
and how large they are."""

from contextlib import AbstractContextManager
from typing import Any

import grpc

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

    def enter(self, method: str, context: Context) -> "Passage":
        """A call that begins. Raises RequestRefused (OVERLOADED, INVALID_REQUEST)."""
        peer = context.peer()
        if method in SHAPES:
            tenant, calls = tenant_of(context.invocation_metadata()), self._calls
            account, sender = tenant or host_of(peer), tenant or peer
        else:
            account, sender, calls = peer, peer, self._other_calls
        calls.open(account)
        return Passage(method, account, sender, calls, self._reading, self._size)


class Passage:
    """One call's way through the gate."""

    __slots__ = ("_account", "_calls", "_held", "_method", "_reading", "_sender", "_size")

    def __init__(
        self, method: str, account: str, sender: str, calls: OpenCalls, reading: Reading, size: RequestSize
    ) -> None:
        self._method, self._account, self._sender = method, account, sender
        self._calls, self._reading, self._size = calls, reading, size
        self._held: AbstractContextManager[None] | None = None

    async def read(self, context: Context) -> Any:
        """The bytes of the call's request; grpc.aio.EOF where it sends none. Raises RequestRefused where they are not
        worth parsing, where there are too many in memory, and where they do not come."""
        async with self._reading.place(self._sender):
            raw: Any = await context.read()
        if raw is not grpc.aio.EOF and len(raw) > UNSEEN_BYTES:
            held = self._size.holding(len(raw), self._account)
            held.__enter__()
            self._held = held
            await self._size.check(self._method, raw)
        return raw

    async def check(self, raw: bytes) -> None:
        """Of a message that follows the first one. Raises RequestRefused."""
        await self._size.check(self._method, raw)

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
