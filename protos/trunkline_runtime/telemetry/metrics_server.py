"""A small HTTP server for /metrics alone, on a port of its own, in the event loop of a server process."""

import asyncio
import contextlib
import ssl
import time
from collections.abc import Callable

from trunkline_runtime.log import get_logger
from trunkline_runtime.server import port_problem
from trunkline_runtime.telemetry.exposition import Collect, FreshAnswers
from trunkline_runtime.telemetry.scrape_tokens import ScrapeTokens

PATH = "/metrics"
MAX_CONNECTIONS = 32
MAX_HEAD_BYTES = 8 << 10
REQUEST_TIMEOUT_S = 5.0  # for the request to arrive, TLS included
RESPONSE_TIMEOUT_S = 10.0  # for the answer to be read
REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 405: "Method Not Allowed"}


class MetricsServer:
    """Answers one request per connection. Connections beyond MAX_CONNECTIONS are closed at once.

    collect: returns the metrics of now; tls: None for plaintext
    """

    def __init__(
        self,
        collect: Collect,
        tokens: ScrapeTokens,
        tls: ssl.SSLContext | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fresh = FreshAnswers(collect, now_s)
        self._tokens = tokens
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()  # one for each connection
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Listens; port 0 picks a free one. Raises PortInUse."""
        try:
            self._server = await asyncio.start_server(
                self._serve,
                host,
                port,
                limit=MAX_HEAD_BYTES,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else REQUEST_TIMEOUT_S,
            )
        except OSError as error:
            raise port_problem(host, port, error, "--metrics-port") from None
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stops listening. Answers that are being sent are cut off."""
        if self._server is not None:
            self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._serving) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        self._serving.add(task)
        try:
            await self._answer(reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the client is slow, gone, or speaks another protocol
        except Exception as error:
            get_logger().error("unexpected error", exc_info=error)
        finally:
            self._serving.discard(task)
            writer.transport.abort()  # what was to be sent has been sent: nothing of a slow reader is kept

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            head = await reader.readuntil(b"\r\n\r\n")
        status, accept = self._judge(head)
        body, content_type = (REASONS[status] + "\n").encode(), "text/plain; charset=utf-8"
        if status == 200:
            async with asyncio.timeout(RESPONSE_TIMEOUT_S):
                body, content_type = await self._fresh.answer(accept)
        headers = [
            f"HTTP/1.1 {status} {REASONS[status]}",
            f"Content-Type: {content_type}",
            f"Content-Length: {len(body)}",
            "Connection: close",
            *(["WWW-Authenticate: Bearer"] if status == 401 else []),
        ]
        writer.transport.set_write_buffer_limits(high=0)  # drain() returns once everything is sent
        writer.write("\r\n".join(headers).encode("latin-1") + b"\r\n\r\n")
        if not head.startswith(b"HEAD "):
            writer.write(body)
        async with asyncio.timeout(RESPONSE_TIMEOUT_S):
            await writer.drain()
            writer.write_eof() if writer.can_write_eof() else writer.close()
            with contextlib.suppress(ConnectionError):
                await reader.read(1)  # until the client has closed: closing before loses what it has not read

    def _judge(self, head: bytes) -> tuple[int, str]:
        """(status, Accept header) of a request."""
        line, *fields = head.split(b"\r\n")
        parts = line.split(b" ")
        if len(parts) != 3 or not parts[2].startswith(b"HTTP/1."):
            return 400, ""
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (field.partition(b":") for field in fields)
        }
        if parts[1].partition(b"?")[0] != PATH.encode():
            return 404, ""
        if parts[0] not in (b"GET", b"HEAD"):
            return 405, ""
        if not self._tokens.allow(headers.get(b"authorization", b"")):
            return 401, ""
        return 200, headers.get(b"accept", b"").decode("latin-1")
