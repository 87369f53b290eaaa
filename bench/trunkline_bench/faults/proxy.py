"""A TCP proxy that simulates network faults between a router and a worker."""

import asyncio
import contextlib
import socket
import struct

CHUNK_BYTES = 1 << 16
# SO_LINGER of zero seconds: closing sends RST, not FIN.
RESETTING = struct.pack("ii", 1, 0)


class Proxy:
    """Forwards 127.0.0.1:port to 127.0.0.1:target unless it is stalled."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self.port = 0

    async def start(self) -> "Proxy":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def stall(self) -> None:
        """Stops forwarding; connections stay open."""
        self._flowing.clear()

    def heal(self) -> None:
        self._flowing.set()

    def reset(self) -> None:
        """Resets every connection (RST). New connections work."""
        for writer in list(self._writers):
            with contextlib.suppress(OSError):
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESETTING)
            writer.transport.abort()

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self.reset()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            their_reader, their_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        pair = {writer, their_writer}
        self._writers |= pair
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pump(reader, their_writer))
                both.create_task(self._pump(their_reader, writer))
        except* (OSError, EOFError):
            pass  # one side has closed; the other is closed below
        finally:
            self._writers -= pair
            for end in pair:
                end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK_BYTES):
            await self._flowing.wait()
            writer.write(data)
            await writer.drain()
        raise EOFError
