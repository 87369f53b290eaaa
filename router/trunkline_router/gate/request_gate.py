"""What every call to a router passes before its request is looked at: how many there are, how many are read at once,
and how large they are."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, AsyncExitStack
from typing import Any

import grpc

from trunkline_router.gate.held_bytes import ByteBounds, HeldBytes
from trunkline_router.gate.message_turns import MessageTurns, taken_in_turn
from trunkline_router.gate.open_calls import (
    CHECK_BOUNDS,
    MAX_CALLS,
    MAX_TENANT_CALLS,
    WATCH_BOUNDS,
    CallBounds,
    OpenCall,
    OpenCalls,
    request_bounds,
)
from trunkline_router.gate.reading import ReadBounds, Reading
from trunkline_router.gate.request_size import SHAPES, UNSEEN_BYTES, RequestSize
from trunkline_router.gate.sender import sender_of
from trunkline_router.request.tenants import tenant_of
from trunkline_router.workers.pool import Pools

BYTE_BOUNDS = ByteBounds()
REQUEST_BOUNDS = request_bounds(MAX_CALLS, MAX_TENANT_CALLS)
HEALTH_CHECK, HEALTH_WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"

Context = grpc.aio.ServicerContext[Any, Any]


class RequestGate:
    """One for all calls of a server. What they take counts for their senders.

    bounds: of the requests that are open; None: REQUEST_BOUNDS
    """

    def __init__(self, pools: Pools, bounds: CallBounds | None = None) -> None:
        self.size = RequestSize(pools)
        self.held = HeldBytes(BYTE_BOUNDS)
        self._requests = OpenCalls(bounds or REQUEST_BOUNDS, "requests")
        self._checks = OpenCalls(CHECK_BOUNDS, "health checks")
        self._watches = OpenCalls(WATCH_BOUNDS, "health watches")
        self._others = OpenCalls(WATCH_BOUNDS, "other calls")
        self._reading = Reading()
        # An orchestrator that has no answer to its check ends the process: a check waits for no other call.
        self._reading_checks = Reading(ReadBounds(*4 * (CHECK_BOUNDS.in_all,), last=0))
        self.turns = MessageTurns()

    def large_requests(self) -> tuple[int, int]:
        """Bytes of large requests in memory, as they came, and of all so far."""
        return self.held.num_bytes, self.held.bytes_so_far

    def enter(self, method: str, context: Context) -> "Passage":
        """A call that begins. Raises RequestRefused (OVERLOADED, INVALID_REQUEST)."""
        peer, task = context.peer(), asyncio.current_task()
        assert task is not None  # grpc gives each call one
        tenant = tenant_of(context.invocation_metadata()) if method in SHAPES else ""
        call = OpenCall(sender_of(peer, tenant), task.cancel)
        if method == HEALTH_CHECK:
            self._checks.open_in_any_case(call)
            return Passage(self, method, call, self._checks, self._reading_checks)
        calls = self._requests if method in SHAPES else self._watches if method == HEALTH_WATCH else self._others
        calls.open(call)
        return Passage(self, method, call, calls, self._reading)


class Passage:
    """One call's way through the gate."""

    __slots__ = ("_call", "_calls", "_gate", "_has_first", "_held", "_method", "_reading")

    def __init__(self, gate: RequestGate, method: str, call: OpenCall, calls: OpenCalls, reading: Reading) -> None:
        self._gate, self._method = gate, method
        self._call, self._calls, self._reading = call, calls, reading
        self._has_first = False
        self._held: AbstractContextManager[None] | None = None

    async def read(self, context: Context) -> Any:
        """The bytes of the call's next message; grpc.aio.EOF where it sends none. Raises RequestRefused where they are
        not worth parsing, where there are too many in memory, and where the first ones do not come."""
        self.answer_begins()  # what was read before has been looked at
        raw = await (self._read_next(context) if self._has_first else self._read_first(context))
        self._has_first = True
        if self._method in SHAPES:
            self._calls.keep(self._call)  # others are given up while they last
        if raw is not grpc.aio.EOF and len(raw) > UNSEEN_BYTES:
            held = self._gate.held.holding(len(raw), self._call.sender, self._call.give_up)
            held.__enter__()
            self._held = held
            await self._gate.size.check(self._method, raw)
        return raw

    async def _read_first(self, context: Context) -> Any:
        async with self._reading.place(self._call.sender) as arrived:

            async def turn() -> None:
                arrived()
                await self._gate.turns.turn(self._call.sender.account)

            return await self._taken(context, turn)

    async def _read_next(self, context: Context) -> Any:
        """It comes when its client has something to say, so it takes a place when it has arrived."""
        async with AsyncExitStack() as stack:

            async def turn() -> None:
                arrived = await stack.enter_async_context(self._reading.place(self._call.sender))
                arrived()
                await self._gate.turns.turn(self._call.sender.account)

            return await self._taken(context, turn)

    async def _taken(self, context: Context, turn: Callable[[], Coroutine[Any, Any, None]]) -> Any:
        num_bytes = 0
        try:
            raw: Any = await taken_in_turn(context.read(), turn)
            num_bytes = 0 if raw is grpc.aio.EOF else len(raw)
        finally:
            self._gate.turns.took(self._call.sender.account, num_bytes)
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
        self._calls.close(self._call)
