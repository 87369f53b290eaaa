"""One HTTP request that passes the gate: the same limits as for calls over gRPC."""

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from trunkline.status import RequestRefused
from trunkline_router.access.gate.message_turns import LOOP_BYTES_PER_S
from trunkline_router.access.gate.open_calls import OpenCall
from trunkline_router.access.gate.request_size import UNSEEN_BYTES
from trunkline_router.access.gate.sender import Sender, sender_of

if TYPE_CHECKING:
    from trunkline_router.access.gate.request_gate import RequestGate


class HttpPassage:
    """Counts one request from `with` until its end, and the memory of its body until the answer begins.

    peer: the client's address as gRPC writes it, "ipv4:10.0.0.1:50312"
    give_up: ends the request with a refusal
    """

    def __init__(
        self, gate: "RequestGate", peer: str, tenant: str, give_up: Callable[[RequestRefused], object]
    ) -> None:
        self._gate = gate
        self._call = OpenCall(sender_of(peer, tenant), give_up)
        self._held: AbstractContextManager[None] | None = None

    def __enter__(self) -> "HttpPassage":
        """Raises RequestRefused (OVERLOADED) if too many requests are open."""
        self._gate.requests.open(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        self.answer_begins()
        self._gate.requests.close(self._call)

    async def read(self, body: Callable[[], Awaitable[bytes]]) -> bytes:
        """Returns the request's body, read by `body`. Raises RequestRefused if it takes too long, or if large requests
        take too much memory."""
        raw = b""
        async with self._gate.reading.place(reader_of(self._call.sender)) as arrived:
            raw = await body()
            arrived()
            await self._turn(raw)
        self._keep(raw)
        return raw

    async def read_arrived(self, body: Callable[[], Awaitable[bytes]]) -> bytes:
        """As read(), for a body that has arrived as a whole. It needs no place among the bodies that are being read:
        those bound the memory of bodies that grow, and a connection pauses a body at 64 KiB until it is taken."""
        raw = await body()
        await self._turn(raw)
        self._keep(raw)
        return raw

    def parsed(self, cpu_s: float) -> None:
        """Counts the time for which the event loop parsed the body as bytes that it could have read instead. A body of
        numbers takes several times as long as a text of its length."""
        self._gate.turns.took(self._call.sender.account, int(cpu_s * LOOP_BYTES_PER_S))

    async def _turn(self, raw: bytes) -> None:
        account = self._call.sender.account
        await self._gate.turns.turn(account)
        self._gate.turns.took(account, len(raw))

    def _keep(self, raw: bytes) -> None:
        """Counts the body. A request that was read is not given up."""
        self._gate.requests.keep(self._call)
        if len(raw) > UNSEEN_BYTES:
            held = self._gate.held.holding(len(raw), self._call.sender, self._call.give_up)
            held.__enter__()
            self._held = held

    def answer_begins(self) -> None:
        """Stops counting the request against the memory for large requests."""
        if self._held is not None:
            self._held.__exit__(None, None, None)
            self._held = None


class StatusPassage(HttpPassage):
    """One request for the state of the router: it is answered at once, reads no body and is not counted. So probes are
    answered however many requests are open."""

    def __enter__(self) -> "StatusPassage":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def reader_of(sender: Sender) -> Sender:
    """The sender among those whose messages are read. Over gRPC a connection carries many requests; over HTTP it
    carries one at a time, and a client that opens a thousand connections must not have a thousand turns. So the
    connections of a tenant on a host count together, and share the tenant's turns."""
    return Sender(sender.host, f"{sender.account} over HTTP", sender.connection)
