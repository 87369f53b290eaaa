"""A TLS handshake in progress: counted like a connection, so that clients that never complete one cannot take all of a
process's descriptors.

asyncio's own servers tell of a TLS connection only once its handshake is complete. So the server accepts connections
without TLS, and each starts TLS itself.
"""

import asyncio
import contextlib
import ssl
from typing import cast

from uvicorn.protocols.utils import get_remote_addr

from trunkline_router.http.wire.connection import HIGH_WATER_BYTES, Connection
from trunkline_router.http.wire.connections import Connections
from trunkline_router.http.wire.shared import Shared

# Of all connections, those that may be in a handshake. Beyond it the host with the most handshakes loses its oldest
# one, and never a connection that is established.
HANDSHAKE_SHARE = 1 / 4


class Arrived(asyncio.Protocol):
    """Keeps what arrives for the protocol that comes next."""

    def __init__(self) -> None:
        self.data = bytearray()

    def data_received(self, data: bytes) -> None:
        self.data += data


class Handshake(Arrived):
    """A connection until its handshake is complete. Then a Connection takes its place.

    handshakes: those of the server, which are among its connections too
    """

    def __init__(self, shared: Shared, handshakes: Connections, context: ssl.SSLContext) -> None:
        super().__init__()
        self._shared = shared
        self._handshakes = handshakes
        self._context = context
        self._transport: asyncio.Transport | None = None
        self.host = ""

    def is_busy(self) -> bool:
        return False

    def drop(self) -> None:
        """Closes the connection at once."""
        self._leave()
        if self._transport is not None:
            self._transport.abort()

    def overdue(self, now_s: float) -> None:
        """Does nothing: the event loop limits the time of a handshake."""

    def shutdown(self) -> None:
        """Closes the connection at once: there is no response to wait for."""
        self.drop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Counts the handshake, or drops it if there are too many."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        client = get_remote_addr(self._transport)
        self.host = client[0] if client else ""
        if self._handshakes.add(self) and self._shared.connections.add(self):
            tasks = self._shared.state.tasks
            task = asyncio.get_running_loop().create_task(self._shake_hands(self._transport))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        else:
            self.drop()

    async def _shake_hands(self, transport: asyncio.Transport) -> None:
        try:
            with contextlib.suppress(OSError):  # an error of TLS, a lost connection, or too long a time
                await self._secure(transport)
        finally:
            self._leave()

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
        self._leave()
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

    def _leave(self) -> None:
        self._handshakes.remove(self)
        self._shared.connections.remove(self)
