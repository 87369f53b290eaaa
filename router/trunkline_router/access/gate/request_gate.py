"""What every call to a router passes before its request is parsed: credentials, and the limits on open calls,
concurrent reads and sizes."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, AsyncExitStack
from typing import Any

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest

from trunkline.status import RequestRefused
from trunkline_router.access.access import Access, Context, refused_tenant
from trunkline_router.access.gate.held_bytes import ByteBounds, HeldBytes
from trunkline_router.access.gate.message_turns import MessageTurns, taken_in_turn
from trunkline_router.access.gate.open_calls import (
    CHECK_BOUNDS,
    MAX_CALLS,
    MAX_TENANT_CALLS,
    WATCH_BOUNDS,
    CallBounds,
    OpenCall,
    OpenCalls,
    request_bounds,
)
from trunkline_router.access.gate.reading import ReadBounds, Reading
from trunkline_router.access.gate.request_size import SHAPES, UNSEEN_BYTES, RequestSize
from trunkline_router.access.gate.sender import sender_of
from trunkline_router.access.identity.needed_roles import HEALTH_CHECK, HEALTH_WATCH, METHODS, role_of
from trunkline_router.address import host_of
from trunkline_router.record.refused_calls import RefusedCall, RefusedCalls
from trunkline_router.record.request_record import GRPC
from trunkline_router.workers.pool import Pools
from trunkline_runtime.server import LIVENESS
from trunkline_runtime.tracing import trace_context_of

BYTE_BOUNDS = ByteBounds()
REQUEST_BOUNDS = request_bounds(MAX_CALLS, MAX_TENANT_CALLS)
HEALTH = (HEALTH_CHECK, HEALTH_WATCH)
LIVENESS_CHECK = HealthCheckRequest(service=LIVENESS).SerializeToString()


class RequestGate:
    """Admits all calls of a server and accounts for their resources by sender.

    bounds: limits on open requests; None for REQUEST_BOUNDS
    refused: is told of calls that were no requests yet; None: only the log is
    """

    def __init__(
        self, pools: Pools, access: Access, bounds: CallBounds | None = None, refused: RefusedCalls | None = None
    ) -> None:
        self.access = access
        self.size = RequestSize(pools)
        self.held = HeldBytes(BYTE_BOUNDS)
        self.requests = OpenCalls(bounds or REQUEST_BOUNDS, "requests")
        self._checks = OpenCalls(CHECK_BOUNDS, "health checks")
        self._watches = OpenCalls(WATCH_BOUNDS, "health watches")
        self._others = OpenCalls(WATCH_BOUNDS, "other calls")
        self.reading = Reading()
        # An orchestrator kills a process that does not answer a health check, so checks wait for no other call.
        self._reading_checks = Reading(ReadBounds(*4 * (CHECK_BOUNDS.in_all,), last=0))
        self.turns = MessageTurns()
        self.refused = refused or RefusedCalls()

    def enter(self, method: str, context: Context) -> "Passage":
        """Admits a new call. Raises RequestRefused (UNAUTHENTICATED, FORBIDDEN, OVERLOADED or INVALID_REQUEST)."""
        started_s, tenant = time.monotonic(), ""
        try:
            tenant = self._tenant(method, context)
            return self._open(method, context, tenant, started_s)
        except RequestRefused as refused:
            self.note_refusal(method, context, refused, tenant, started_s)
            raise

    def note_refusal(
        self, method: str, context: Context, refused: RequestRefused, tenant: str, started_s: float
    ) -> None:
        """A call over gRPC is refused before its request is parsed, so its request id is not known.

        tenant: "" if the caller was not admitted.  started_s: when the call arrived
        """
        traceparent, tracestate = trace_context_of(context.invocation_metadata())
        self.refused.note(
            RefusedCall(
                GRPC,
                refused.reason,
                refused.code,
                route=method.removeprefix("/"),
                host=host_of(context.peer()),
                tenant=tenant or refused_tenant(refused),
                field=refused.field,
                traceparent=traceparent,
                tracestate=tracestate,
                started_s=started_s,
            )
        )

    def _tenant(self, method: str, context: Context) -> str:
        """The tenant of a call that may be made; "" if it needs none. Raises RequestRefused."""
        needed = METHODS[method]
        role = role_of(needed)
        if role is not None:
            return self.access.admit(context, role).tenant
        if method not in HEALTH:  # see Passage.read
            self.access.check(context.invocation_metadata(), needed, context.peer())
        return ""

    def _open(self, method: str, context: Context, tenant: str, started_s: float) -> "Passage":
        task = asyncio.current_task()
        assert task is not None  # grpc gives each call one
        call = OpenCall(sender_of(context.peer(), tenant), task.cancel)
        if method == HEALTH_CHECK:
            self._checks.open_in_any_case(call)
            return Passage(self, method, call, self._checks, self._reading_checks, started_s)
        calls = self.requests if method in SHAPES else self._watches if method == HEALTH_WATCH else self._others
        calls.open(call)
        return Passage(self, method, call, calls, self.reading, started_s)


class Passage:
    """One admitted call: reads its messages within the limits and accounts for them."""

    __slots__ = ("_call", "_calls", "_gate", "_has_first", "_held", "_method", "_reading", "_started_s")

    def __init__(
        self,
        gate: RequestGate,
        method: str,
        call: OpenCall,
        calls: OpenCalls,
        reading: Reading,
        started_s: float,
    ) -> None:
        self._gate, self._method, self._started_s = gate, method, started_s
        self._call, self._calls, self._reading = call, calls, reading
        self._has_first = False
        self._held: AbstractContextManager[None] | None = None

    async def read(self, context: Context) -> Any:
        """Returns the bytes of the call's next message, or grpc.aio.EOF at the end.

        Raises RequestRefused if the message cannot be a legal request, if large requests take too much memory, or if
        the first message does not arrive in time. Is cancelled with RequestRefused if the call is given up.
        """
        try:
            return await self._read(context)
        except RequestRefused as refused:
            self._note(context, refused)
            raise
        except asyncio.CancelledError as cancelled:
            if cancelled.args and isinstance(cancelled.args[0], RequestRefused):
                self._note(context, cancelled.args[0])
            raise

    def _note(self, context: Context, refused: RequestRefused) -> None:
        self._gate.note_refusal(self._method, context, refused, self._call.sender.tenant, self._started_s)

    async def _read(self, context: Context) -> Any:
        self.answer_begins()  # the previous message has been handled
        raw = await (self._read_next(context) if self._has_first else self._read_first(context))
        self._has_first = True
        if self._method in SHAPES:
            self._calls.keep(self._call)  # a request that was read is not given up
        if self._method in HEALTH and raw != LIVENESS_CHECK:
            self._gate.access.check(context.invocation_metadata(), METHODS[self._method], context.peer())
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
        """Later messages come at any time, so they take a place only once they have arrived."""
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
        """Stops counting the request against the memory for large requests. Worker capacity bounds the requests that
        are being answered."""
        if self._held is not None:
            self._held.__exit__(None, None, None)
            self._held = None

    def leave(self) -> None:
        """Records that the call has ended."""
        self.answer_begins()
        self._calls.close(self._call)
