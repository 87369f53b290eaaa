"""A TLS handshake in progress. Clients that never complete one cannot take all of a process's descriptors, and cannot
push out connections that are established: a connection counts as one only once its handshake is complete.

asyncio's own servers tell of a TLS connection only once its handshake is complete. So the server accepts connections
without TLS, and each starts TLS itself.
"""

import asyncio
import contextlib
import ssl
from typing import cast

from uvicorn.protocols.utils import get_remote_addr

from trunkline_router.address import network_of
from trunkline_router.edge.http.wire.connection import HIGH_WATER_BYTES, Connection
from trunkline_router.edge.http.wire.handshakes import Handshakes
from trunkline_router.edge.http.wire.shared import Shared

HANDSHAKE_SHARE = 1 / 4  # of all connections, those that are kept for handshakes


class Arrived(asyncio.Protocol):
    """Keeps what arrives for the protocol that comes next."""

    def __init__(self) -> None:
        self.data = bytearray()

    def data_received(self, data: bytes) -> None:
        self.data += data


class Handshake(Arrived):
    """A connection until its handshake is complete. Then a Connection takes its place.

    handshakes: those of the server. The event loop limits the time of each.
    """

    def __init__(self, shared: Shared, handshakes: Handshakes, context: ssl.SSLContext) -> None:
        super().__init__()
        self._shared = shared
        self._handshakes = handshakes
        self._context = context
        self._transport: asyncio.Transport | None = None
        self.host = ""

    def drop(self) -> None:
        """Closes the connection at once."""
        self._handshakes.remove(self)
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Counts the handshake, and begins it."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        client = get_remote_addr(self._transport)
        self.host = network_of(client[0]) if client else ""
        self._handshakes.add(self)
        tasks = self._shared.state.tasks
        task = asyncio.get_running_loop().create_task(self._shake_hands(self._transport))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _shake_hands(self, transport: asyncio.Transport) -> None:
        try:
            with contextlib.suppress(OSError):  # an error of TLS, a lost connection, or too long a time
                await self._secure(transport)
        finally:
            self._handshakes.remove(self)

    async def _secure(self, transport: asyncio.Transport) -> None:
        if transport.is_closing():
            return
        loop, arrived = asyncio.get_running_loop(), Arrived()
        # The protocol of TLS keeps what has arrived until it begins, which it does in the next callback.
        loop.call_soon(self._pass_on, transport)
        limit_s = self._shared.limits.head_s
        secure = await loop.start_tls(
            transport, arrived, self._context, server_side=True, ssl_handshake_timeout=limit_s
        )
        if secure is None or transport.is_closing():  # the client has gone meanwhile
            return
        self._handshakes.remove(self)
        connection = Connection(self._shared, transport)
        secure.set_protocol(connection)
        connection.connection_made(secure)
        if arrived.data and not secure.is_closing():
            connection.data_received(bytes(arrived.data))

    def _pass_on(self, transport: asyncio.Transport) -> None:
        protocol = cast("asyncio.BufferedProtocol", transport.get_protocol())
        while self.data and not transport.is_closing():
            room = memoryview(protocol.get_buffer(len(self.data)))
            num_bytes = min(len(room), len(self.data))
            room[:num_bytes] = self.data[:num_bytes]
            del self.data[:num_bytes]
            protocol.buffer_updated(num_bytes)
