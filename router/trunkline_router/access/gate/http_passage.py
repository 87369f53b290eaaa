"""One HTTP request that passes the gate: the same limits as for calls over gRPC."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from trunkline_router.access.gate.places import GiveUp, Place, http_sender_of
from trunkline_router.access.gate.request_size import UNSEEN_BYTES
from trunkline_router.access.gate.turns import LOOP_BYTES_PER_S

if TYPE_CHECKING:
    from trunkline_router.access.gate.request_gate import RequestGate


class HttpPassage:
    """Counts one request from `with` until its end, and the memory of its body until the answer begins.

    peer: the client's address as gRPC writes it, "ipv4:10.0.0.1:50312"
    give_up: ends the request with a refusal
    """

    def __init__(self, gate: "RequestGate", peer: str, tenant: str, give_up: GiveUp) -> None:
        self._gate = gate
        self.peer = peer
        self._sender = http_sender_of(peer, tenant)
        self._give_up = give_up
        self._place: Place  # from __enter__ on
        self._held: Place | None = None  # of a large body
        self._parsed_bytes = 0

    def __enter__(self) -> "HttpPassage":
        """Raises RequestRefused (OVERLOADED) if too many requests are open."""
        self._place = self._gate.requests.take(self._sender, self._give_up)
        return self

    def __exit__(self, *_: object) -> None:
        self.answer_begins()
        self._gate.requests.release(self._place)

    async def read(self, body: Callable[[], Awaitable[bytes]]) -> bytes:
        """Returns the request's body, read by `body`. Raises RequestRefused if large requests take too much memory. Is
        cancelled with RequestRefused if the request is given up, or the body takes too long."""
        requests, reading = self._gate.requests, self._gate.reading
        requests.loosen(self._place)
        place = await reading.begin(self._sender, self._give_up)
        try:
            raw = await body()
        finally:
            reading.end(place)
        requests.keep(self._place)  # a request that was read is not given up
        return self._counted(raw)

    async def read_arrived(self, body: Callable[[], Awaitable[bytes]]) -> bytes:
        """As read(), for a body that has arrived as a whole. It needs no place among the bodies that are being read:
        those bound the memory of bodies that grow, and a connection stops reading a body at 64 KiB, or one read later,
        until that is taken."""
        return self._counted(await body())

    def _counted(self, raw: bytes) -> bytes:
        """Counts the memory of a large body, and returns it."""
        if len(raw) > UNSEEN_BYTES:
            self._held = self._gate.held.take(self._sender, self._give_up, len(raw))
            self._gate.held.loosen(self._held)
        return raw

    @asynccontextmanager
    async def turn(self, num_bytes: int = 0) -> AsyncGenerator[None]:
        """The turn of a large body, held while it is parsed and checked, and while it is converted."""
        if self._held is None:
            yield
            return
        turns, account = self._gate.turns, self._sender.account
        async with turns.held(account):
            await self.step()
            turns.took(account, num_bytes)
            yield

    async def step(self) -> None:
        """Lets other tasks run, and returns when the next step on the body may be taken. The messages of other tenants
        need not wait for all steps of a large body."""
        await asyncio.sleep(0)
        if self._held is not None:
            await self._gate.turns.step()

    def parsed(self, cpu_s: float) -> None:
        """Counts the time for which the event loop parsed and checked the body as bytes that it could have read
        instead. A body of numbers or of many messages takes several times as long as a text of its length."""
        if self._held is not None:  # others take less than a millisecond
            num_bytes = int(cpu_s * LOOP_BYTES_PER_S)
            self._parsed_bytes += num_bytes
            self._gate.turns.took(self._sender.account, num_bytes, in_all=self._parsed_bytes)

    def answer_begins(self) -> None:
        """Stops counting the request against the memory for large requests."""
        if self._held is not None:
            self._gate.held.release(self._held)
            self._held = None


class StatusPassage(HttpPassage):
    """One request for the state of the router: it is answered at once, reads no body and is not counted. So probes are
    answered however many requests are open."""

    def __enter__(self) -> "StatusPassage":
        return self

    def __exit__(self, *_: object) -> None:
        """Holds nothing."""
