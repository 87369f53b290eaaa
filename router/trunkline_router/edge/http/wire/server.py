"""The HTTP server of a router: uvicorn's protocol in the event loop that is already running."""

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Sequence
from email.utils import formatdate

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp
from uvicorn.config import Config

from trunkline_router.edge.http.wire.connection import Connection
from trunkline_router.edge.http.wire.connections import Connections
from trunkline_router.edge.http.wire.handshake import HANDSHAKE_SHARE, Handshake
from trunkline_router.edge.http.wire.handshakes import Handshakes
from trunkline_router.edge.http.wire.limits import HttpLimits
from trunkline_router.edge.http.wire.shared import Shared
from trunkline_router.record.refused_calls import RefusedCalls
from trunkline_runtime.server import PortInUse, address_family, most_connections, port_problem

PORT_OPTION = "--http-port"
BACKLOG = 2048
# Unread output stays in the process's own buffers, which are merged and bounded, and not in the kernel's, which grow to
# megabytes for each connection. What is sent and not yet acknowledged does not count, so no connection is slowed down.
UNSENT_BYTES = 16 << 10
LIMITS = HttpLimits()
EXPOSED_HEADERS = (
    *("x-request-id", "request-id", "x-trunkline-worker", "x-trunkline-cached-tokens", "x-trunkline-warning"),
    *("retry-after", "retry-after-ms", "x-should-retry"),
    *(f"x-ratelimit-{which}-{what}" for which in ("limit", "remaining", "reset") for what in ("requests", "tokens")),
    *(
        f"anthropic-ratelimit-{of}-{which}"
        for of in ("requests", "tokens")
        for which in ("limit", "remaining", "reset")
    ),
)


class HttpServer:
    """Serves an ASGI application over HTTP/1.1. Installs no signal handlers.

    shared_port: other processes listen on the port too, and the kernel distributes connections among them; their parent
    reserves the port (hold_port).
    ssl_context: for TLS. Certificates loaded into it later hold for new connections.
    cors_origins: origins whose pages may use the server from a browser; "*" stands for all. Empty: none
    refused: is told of requests that the server itself refuses; None: only the log is
    max_connections: None: half as many as a gRPC server accepts. With TLS, a share of them is kept for handshakes.
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        *,
        shared_port: bool = False,
        ssl_context: ssl.SSLContext | None = None,
        cors_origins: Sequence[str] = (),
        limits: HttpLimits = LIMITS,
        refused: RefusedCalls | None = None,
        max_connections: int | None = None,
    ) -> None:
        self._host, self._wanted_port, self._shared_port = host, port, shared_port
        self._ssl_context = ssl_context
        self._limits = limits
        most = max_connections or max(1, most_connections() // 2)
        most_handshakes = max(1, int(most * HANDSHAKE_SHARE)) if ssl_context is not None else 0
        self._handshakes = Handshakes(most_handshakes)
        self.connections = Connections(max(1, most - most_handshakes))  # that are established
        self.port = 0  # the bound one, once started
        config = Config(
            with_cors(app, cors_origins),
            http="httptools",
            ws="none",
            lifespan="off",
            loop="none",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
        )
        config.load()
        # Its messages quote what clients send. Errors of handlers are logged by Exchange.
        logging.getLogger("uvicorn").disabled = logging.getLogger("uvicorn.error").disabled = True
        self._shared = Shared(config, limits, self.connections, time.monotonic, refused or RefusedCalls())
        self._server: asyncio.Server | None = None
        self._checks: asyncio.Task[None] | None = None

    @property
    def num_connections(self) -> int:
        """The number of open connections, with those in a handshake."""
        return len(self.connections) + len(self._handshakes)

    async def start(self) -> None:
        """Binds the port and serves. Raises PortInUse."""
        loop = asyncio.get_running_loop()
        listener = listen(self._host, self._wanted_port, shared=self._shared_port)
        self.port = listener.getsockname()[1]
        self._set_date()
        self._server = await loop.create_server(self._accepted, sock=listener, backlog=BACKLOG)
        self._checks = loop.create_task(self._check())

    def _accepted(self) -> asyncio.Protocol:
        if self._ssl_context is None:
            return Connection(self._shared)
        return Handshake(self._shared, self._handshakes, self._ssl_context)

    async def stop(self, grace_s: float) -> None:
        """Takes no new connections or requests, and cuts the responses that are not complete after `grace_s`."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        for handshake in self._handshakes:
            handshake.drop()
        for connection in self.connections:
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self.connections.all_closed()
        tasks = list(self._shared.state.tasks)
        for task in tasks:
            task.cancel()
        for each in (*self._handshakes, *self.connections):
            each.drop()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._checks is not None:
            self._checks.cancel()
            await asyncio.gather(self._checks, return_exceptions=True)

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(self._limits.check_s)
            self._set_date()
            now_s = self._shared.now_s()
            for connection in self.connections:
                connection.overdue(now_s)

    def _set_date(self) -> None:
        self._shared.state.default_headers = [(b"date", formatdate(usegmt=True).encode())]


def listen(host: str, port: int, *, shared: bool) -> socket.socket:
    """A listening socket. Raises PortInUse."""
    listener = socket.socket(address_family(host), socket.SOCK_STREAM)
    try:
        # Connections of the last server may still be in TIME_WAIT, which only a socket with SO_REUSEADDR may ignore.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # connections inherit it
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise port_problem(host, port, error, PORT_OPTION) from None
    return listener


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """The application, which answers pages of these origins; without any, the application as it is."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=list(origins),
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",),
        expose_headers=EXPOSED_HEADERS,
    )


__all__ = ["HttpServer", "PortInUse", "listen", "with_cors"]
