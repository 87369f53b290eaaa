"""Bounds the requests that are read at once. Unread data stays with its client, except a stream's window."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from trunkline.status import CODE_RESOURCE_EXHAUSTED, OVERLOADED, RequestRefused
from trunkline_worker.front.door.places import host_of

PER_CONNECTION = 8  # at once; the connection's other calls wait
RETRY_MS = 1000

Context = grpc.aio.ServicerContext[Any, Any]


class Uploads:
    """Reads at most `most` requests at once. One more displaces another: on the host with the most reads, on that
    host's connection with the most, the one that has been read for longest. Reading a request whose data has arrived
    takes less than a millisecond."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._reading: dict[asyncio.Timeout, str] = {}  # peers by place, oldest first
        self._turns: dict[str, tuple[asyncio.Semaphore, int]] = {}  # by connection, with the number of its calls

    async def read(self, context: Context) -> Any:
        """Returns the first message of a call, or grpc.aio.EOF. Raises RequestRefused (OVERLOADED) if displaced."""
        async with self._turn(context.peer()):
            return await self.read_next(context)

    async def read_next(self, context: Context) -> Any:
        """Does the same without waiting for other reads of the connection."""
        peer = context.peer()
        if len(self._reading) >= self._most:
            displaced = self._displaced_by(peer)
            del self._reading[displaced]
            displaced.reschedule(asyncio.get_running_loop().time())
        try:
            async with asyncio.timeout(None) as place:
                self._reading[place] = peer
                try:
                    return await context.read()
                finally:
                    self._reading.pop(place, None)
        except TimeoutError:
            message = "the request arrived too slowly while many others were being read"
            raise RequestRefused(CODE_RESOURCE_EXHAUSTED, OVERLOADED, message, retry_delay_ms=RETRY_MS) from None

    def _displaced_by(self, peer: str) -> asyncio.Timeout:
        """Returns the place that a request of this peer takes over when all are taken. It may be of the same host."""
        peers = (*self._reading.values(), peer)
        by_connection, by_host = Counter(peers), Counter(map(host_of, peers))

        def held(place: asyncio.Timeout) -> tuple[int, int]:
            of = self._reading[place]
            return by_host[host_of(of)], by_connection[of]

        return max(self._reading, key=held)  # of equals, the oldest

    @asynccontextmanager
    async def _turn(self, peer: str) -> AsyncIterator[None]:
        turn, wanted = self._turns.get(peer, (asyncio.Semaphore(PER_CONNECTION), 0))
        self._turns[peer] = (turn, wanted + 1)
        try:
            async with turn:
                yield
        finally:
            turn, wanted = self._turns.pop(peer)
            if wanted > 1:
                self._turns[peer] = (turn, wanted - 1)
