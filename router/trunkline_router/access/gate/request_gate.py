"""What every call to a router passes before its request is parsed: credentials, and the limits on open calls,
concurrent reads and sizes."""

import asyncio
import time
from typing import Any

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest

from trunkline.status import RequestRefused
from trunkline_router.access.access import Access, Context, refused_tenant
from trunkline_router.access.gate.places import (
    BYTE_BOUNDS,
    CHECK_BOUNDS,
    MAX_CALLS,
    MAX_TENANT_CALLS,
    WATCH_BOUNDS,
    Bounds,
    Place,
    Places,
    request_bounds,
    sender_of,
)
from trunkline_router.access.gate.reading import Reading
from trunkline_router.access.gate.request_size import METHODS as REQUESTS
from trunkline_router.access.gate.request_size import UNSEEN_BYTES, check_size
from trunkline_router.access.gate.turns import MessageTurns, taken_in_turn
from trunkline_router.access.identity.needed_roles import HEALTH_CHECK, HEALTH_WATCH, METHODS
from trunkline_router.address import host_of
from trunkline_router.record.refused_calls import RefusedCall, RefusedCalls
from trunkline_router.record.request_record import GRPC
from trunkline_runtime.server import LIVENESS
from trunkline_runtime.telemetry.trace_context import trace_context_of

REQUEST_BOUNDS = request_bounds(MAX_CALLS, MAX_TENANT_CALLS)
HEALTH = (HEALTH_CHECK, HEALTH_WATCH)
LIVENESS_CHECK = HealthCheckRequest(service=LIVENESS).SerializeToString()


class RequestGate:
    """Admits all calls of a server and accounts for their resources by sender.

    bounds: limits on open requests; None for REQUEST_BOUNDS
    refused: is told of calls that were no requests yet; None: only the log is
    """

    def __init__(self, access: Access, bounds: Bounds | None = None, refused: RefusedCalls | None = None) -> None:
        self.access = access
        self.requests = Places(bounds or REQUEST_BOUNDS, "open requests")
        self.held = Places(BYTE_BOUNDS, "large requests without an answer")
        self.checks = Places(CHECK_BOUNDS, "open health checks")
        self.watches = Places(WATCH_BOUNDS, "open calls that are not requests")
        self.reading = Reading()
        self.turns = MessageTurns()
        self.refused = refused or RefusedCalls()

    def enter(self, method: str, context: Context) -> "Passage":
        """Admits a new call. Raises RequestRefused (UNAUTHENTICATED, FORBIDDEN, OVERLOADED or INVALID_REQUEST)."""
        started_s, tenant = time.monotonic(), ""
        try:
            tenant = self._tenant(method, context)
            return Passage(self, method, context, tenant, started_s)
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
        if needed.roles:
            return self.access.admit(context, needed.roles).tenant
        if method not in HEALTH:  # see Passage.read
            self.access.check(context.invocation_metadata(), needed, context.peer())
        return ""


class Passage:
    """One admitted call: reads its messages within the limits and accounts for them."""

    __slots__ = ("_gate", "_has_first", "_held", "_method", "_place", "_places", "_started_s")

    def __init__(self, gate: RequestGate, method: str, context: Context, tenant: str, started_s: float) -> None:
        """Raises RequestRefused (OVERLOADED) if too many calls are open."""
        self._gate, self._method, self._started_s = gate, method, started_s
        self._has_first = False
        self._held: Place | None = None  # of a large message
        task = asyncio.current_task()
        assert task is not None  # grpc gives each call one
        self._places = gate.requests if method in REQUESTS else gate.checks if method == HEALTH_CHECK else gate.watches
        self._place = self._places.take(sender_of(context.peer(), tenant), task.cancel)
        self._places.loosen(self._place)

    async def read(self, context: Context) -> Any:
        """Returns the bytes of the call's next message, or grpc.aio.EOF at the end.

        Raises RequestRefused if the message cannot be a legal request, or if large requests take too much memory. Is
        cancelled with RequestRefused if the call is given up, or the first message does not arrive in time.
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
        self._gate.note_refusal(self._method, context, refused, self._place.sender.tenant, self._started_s)

    async def _read(self, context: Context) -> Any:
        self.answer_begins()  # the previous message has been handled
        if self._has_first or self._method == HEALTH_CHECK:
            raw = await self._taken(context, None)
        else:
            raw = await self._first(context)
        self._has_first = True
        if self._method in REQUESTS:
            self._places.keep(self._place)  # a request that was read is not given up
        if self._method in HEALTH and raw != LIVENESS_CHECK:
            self._gate.access.check(context.invocation_metadata(), METHODS[self._method], context.peer())
        if raw is not grpc.aio.EOF and len(raw) > UNSEEN_BYTES:
            self._held = self._gate.held.take(self._place.sender, self._place.give_up, len(raw))
            self._gate.held.loosen(self._held)
            await check_size(self._method, raw)
        return raw

    async def _first(self, context: Context) -> Any:
        """Reads the first message. Later ones come at any time, and a health check must wait for no other call: their
        number is bounded with that of their calls, and they take no place among the messages being read."""
        reading = self._gate.reading
        place = await reading.begin(self._place.sender, self._place.give_up)
        try:
            return await self._taken(context, place)
        finally:
            reading.end(place)

    async def _taken(self, context: Context, place: Place | None) -> Any:
        """The next message, taken in its turn.  place: among the messages being read, if it has one"""
        turns, account = self._gate.turns, self._place.sender.account

        async def turn() -> None:
            if place is not None:
                self._gate.reading.arrived(place)
            await turns.turn(account)

        raw: Any = await taken_in_turn(context.read(), turn)
        turns.took(account, 0 if raw is grpc.aio.EOF else len(raw))
        return raw

    def answer_begins(self) -> None:
        """Stops counting the request against the memory for large requests. Worker capacity bounds the requests that
        are being answered."""
        if self._held is not None:
            self._gate.held.release(self._held)
            self._held = None

    def leave(self) -> None:
        """Records that the call has ended."""
        self.answer_begins()
        self._places.release(self._place)
