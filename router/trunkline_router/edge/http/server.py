"""The HTTP server of a router, in the event loop that is already running."""

import asyncio
import contextlib
import errno
import socket
import ssl
import time
from collections.abc import Sequence
from email.utils import formatdate

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from trunkline.status import RequestRefused
from trunkline_router.access.gate.places import Bounds, Places
from trunkline_router.edge.http.connection import Connection, Shared, sender_at
from trunkline_router.edge.http.limits import HttpLimits
from trunkline_router.record.refused_calls import RefusedCalls
from trunkline_runtime.log import get_logger
from trunkline_runtime.server import address_family, most_connections, port_problem

PORT_OPTION = "--http-port"
HANDSHAKE_SHARE = 1 / 4  # of all connections, those that are kept for handshakes
HOST_SHARE = 7 / 8  # of all connections that one host may have: a gateway is one host, but others need room
# Errors of accept() that last until something is freed, and the time between two tries. Other errors are those of one
# connection that is already lost.
NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
NO_ROOM_PAUSE_S = 1.0
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
    port_option: the setting that chooses the port
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
        port_option: str = PORT_OPTION,
    ) -> None:
        self._host, self._wanted_port, self._shared_port = host, port, shared_port
        self._port_option = port_option
        self._limits = limits
        self.port = 0  # the bound one, once started
        self._ssl_context = ssl_context
        most = max_connections or max(1, most_connections() // 2)
        most_handshakes = 0 if ssl_context is None else max(1, int(most * HANDSHAKE_SHARE))
        self._handshakes = Places(_bounds(most_handshakes, 1.0), "handshakes")
        places = Places(_bounds(max(1, most - most_handshakes), HOST_SHARE), "connections")
        self._shared = Shared(with_cors(app, cors_origins), limits, places, time.monotonic, refused or RefusedCalls())
        self._server: asyncio.Server | None = None  # without TLS
        self._accepting: asyncio.Task[None] | None = None  # with TLS
        self._checks: asyncio.Task[None] | None = None  # while the server runs
        self._shared.all_closed.set()

    @property
    def connections(self) -> set[Connection]:
        """The open connections. Over TLS a connection is one once its handshake is complete."""
        return self._shared.connections

    @property
    def num_connections(self) -> int:
        """The number of open connections, with those in a handshake."""
        return len(self.connections) + self._handshakes.num_held

    async def all_closed(self) -> None:
        """Returns once there is no connection."""
        await self._shared.all_closed.wait()

    async def start(self) -> None:
        """Binds the port and serves. Raises PortInUse."""
        loop = asyncio.get_running_loop()
        listener = listen(
            self._host,
            self._wanted_port,
            shared=self._shared_port,
            unread_s=self._limits.unread_s,
            option=self._port_option,
        )
        self.port = listener.getsockname()[1]
        self._set_date()
        self._checks = loop.create_task(self._check())
        if self._ssl_context is None:
            self._server = await loop.create_server(self._connection, sock=listener, backlog=BACKLOG)
        else:
            self._accepting = loop.create_task(self._accept_tls(listener, self._ssl_context))

    def _connection(self) -> Connection:
        return Connection(self._shared)

    async def _accept_tls(self, listener: socket.socket, context: ssl.SSLContext) -> None:
        """Accepts connections and completes a handshake on each. asyncio's own servers tell of a connection only when
        its handshake is complete, and so would not bound those that never are."""
        loop = asyncio.get_running_loop()
        with listener:
            async with asyncio.TaskGroup() as handshakes:
                while True:
                    try:
                        accepted, address = await loop.sock_accept(listener)
                    except OSError as error:
                        await asyncio.sleep(NO_ROOM_PAUSE_S if error.errno in NO_ROOM else 0)
                        continue
                    handshakes.create_task(self._shake_hands(accepted, address, context))
                    await asyncio.sleep(0)  # while connections wait, sock_accept() lets no other task run

    async def _shake_hands(self, accepted: socket.socket, address: tuple[str, int], context: ssl.SSLContext) -> None:
        """A new handshake is not refused: at the limit an older one makes room. A client that means to connect needs a
        few round trips, so those that have been silent for longer go first, even if each is of another host."""
        task = asyncio.current_task()
        assert task is not None
        try:
            place = self._handshakes.take(sender_at(address), task.cancel)
        except RequestRefused:
            accepted.close()
            return
        self._handshakes.loosen(place)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._connection,
                accepted,
                ssl=context,
                ssl_handshake_timeout=self._limits.head_s,
                ssl_shutdown_timeout=self._limits.unread_s,
            )
        except OSError:  # an error of TLS, a lost connection, or too long a time
            pass
        except Exception as error:  # a bug with one connection must not end the others, and the accepting of new ones
            accepted.close()
            get_logger().error("unexpected error", exc_info=error)
        finally:
            self._handshakes.release(place)

    async def stop(self, grace_s: float) -> None:
        """Takes no new connections or requests, and cuts the responses that are not complete after `grace_s`."""
        checks, self._checks = self._checks, None
        if checks is None:
            return
        if self._server is not None:
            self._server.close()
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait([self._accepting])
        for connection in list(self.connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self.all_closed()
        tasks = [checks, *self._shared.tasks]
        for task in tasks:
            task.cancel()
        for connection in list(self.connections):
            connection.drop()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(self._limits.check_s)
            self._set_date()
            now_s = self._shared.now_s()
            for connection in list(self.connections):
                connection.overdue(now_s)

    def _set_date(self) -> None:
        self._shared.date_line = b"date: " + formatdate(usegmt=True).encode()


def _bounds(most: int, host_share: float) -> Bounds:
    return Bounds(in_all=most, of_host=max(1, int(most * host_share)), of_connection=most, of_tenant=most)


def listen(host: str, port: int, *, shared: bool, unread_s: float, option: str = PORT_OPTION) -> socket.socket:
    """A listening socket. Raises PortInUse.

    unread_s: connections whose clients take nothing for so long, while output waits for them, are ended by the kernel
    option: the setting that chooses the port
    """
    listener = socket.socket(address_family(host), socket.SOCK_STREAM)
    try:
        # Connections of the last server may still be in TIME_WAIT, which only a socket with SO_REUSEADDR may ignore.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # connections inherit it
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # the same; Linux
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(unread_s * 1e3))
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise port_problem(host, port, error, option) from None
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
