"""The gRPC server of all Trunkline processes: health, reflection, error translation, limits."""

import asyncio
import contextlib
import errno
import logging
import resource
import signal
import socket
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from trunkline.channel import KEEPALIVE_MS, MAX_MESSAGE_BYTES
from trunkline_runtime.errors import ErrorInterceptor, RequestGate
from trunkline_runtime.tls import ServerTls

LIVENESS = "liveness"
READINESS = "readiness"

# Open calls of a connection; the client's library queues further ones. Each takes about 20 KB before its handler runs.
# With this limit gRPC also refuses streams while as many cancelled ones are still being cleaned up, so that a client
# that opens and resets streams in a loop cannot fill the memory. gRPC then also refuses streams of a client that keeps
# as many calls open as allowed and replaces each ended call immediately. So the limit is far above the need of one
# connection: with 256, a client with 600 calls at a time had more than half of them refused.
MAX_STREAMS_PER_CONNECTION = 1000
# grpc.aio accepts one call per turn of the event loop. Others wait in gRPC's core, first come first served for all
# connections. When a call arrives, those that have waited for longer are cancelled. This bounds their number, and how
# long a flood delays other clients' calls.
MAX_UNACCEPTED_S = 10
# For servers whose calls may wait before they are read (RequestGate). The unread data of a call stays in memory, up to
# its stream's window, and gRPC widens the windows of a fast connection to megabytes each unless probing is disabled. A
# message that is being read still gets the window that it needs.
UNREAD_OPTIONS = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16 << 10))
# Idle connections take 15 KiB each; the server closes further ones. Half of the process's file limit is left for
# others.
MAX_CONNECTIONS, CONNECTIONS_PER_FILE = 8192, 0.5
MAX_CONNECTION_IDLE_S = 300.0  # without a call; the client opens another connection when it needs one
# Only "identity" is allowed. gRPC decompresses a whole message before it checks the size limit, so a few KB could
# become gigabytes. Clients that compress get UNIMPLEMENTED and the list of allowed algorithms.
NO_COMPRESSION = 1
# Any host may connect to the port for probes. Kubernetes opens a connection for each probe.
PROBE_OPTIONS = (
    ("grpc.max_receive_message_length", 4 << 10),
    ("grpc.max_concurrent_streams", 8),
    ("grpc.max_allowed_incoming_connections", 64),
    ("grpc.max_connection_idle_ms", 10_000),
)


# Of gRPC's library. Any host could fill the log with these lines, or have it quote keys.
GRPC_LOG = "grpc._cython.cygrpc"
# Logged with a traceback for a path or metadata that are not UTF-8, which may be a credential. The library then takes
# the bytes as Latin-1, and the call goes on.
QUOTES_BYTES = "Invalid encoding on %s"
# What the library raises for calls of methods that do not exist, after which it ends the call: nothing can be sent any
# more because the stream has ended, or the path is not UTF-8. Whatever the methods that exist raise is not logged by
# the library, but by ErrorInterceptor.
OF_CLIENTS = (grpc.aio.InternalError, UnicodeDecodeError)


class PortInUse(Exception):
    """The port is taken or cannot be bound. The message is one line for a person."""


def check_port_is_free(host: str, port: int, flag: str = "--port") -> None:
    """Raises PortInUse if the port cannot be bound now. An early check before a slow start: only bind() is certain."""
    with socket.socket(address_family(host), socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise port_problem(host, port, error, flag) from None


def hold_port(host: str, port: int, option: str = "--port") -> socket.socket:
    """A socket that reserves the port for this user's servers with `shared_port`. It accepts no connections itself.

    Port 0 chooses a free port. Raises PortInUse, which names the `option` that chooses another one.
    """
    try:
        return _hold(host, port, option, reuse=0)
    except PortInUse:
        # Connections of the last server may still be in TIME_WAIT, which only a socket with SO_REUSEADDR may ignore.
        # That is not the first attempt, because two sockets with SO_REUSEADDR can both bind a port without a listener.
        return _hold(host, port, option, reuse=1)


def _hold(host: str, port: int, option: str, *, reuse: int) -> socket.socket:
    holder = socket.socket(address_family(host), socket.SOCK_STREAM)
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        holder.bind((host, port))  # exclusively: SO_REUSEPORT is not set yet
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError as error:
        holder.close()
        raise port_problem(host, port, error, option) from None
    return holder


def address_family(host: str) -> socket.AddressFamily:
    """The address family of an address, not of a name."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def port_problem(host: str, port: int, error: OSError, option: str = "--port") -> PortInUse:
    """What is wrong with a port that cannot be bound."""
    reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be bound: {error.strerror}"
    return PortInUse(f"port {port} on {host} {reason}; choose another with {option}")


def most_connections() -> int:
    """Most connections that a server of this process accepts."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if files < 0 else min(MAX_CONNECTIONS, int(files * CONNECTIONS_PER_FILE))


class GrpcServer:
    """A gRPC server with health and reflection. Add other services to `.grpc`.

    services: the full names of those services
    shared_port: other processes listen on the port too, and the kernel distributes connections among them; their parent
    reserves the port (hold_port).
    max_connection_age_s: a connection of about this age takes no new calls, and the client opens another one; running
    calls continue. None: no limit.
    max_request_bytes: gRPC itself refuses a longer message with RESOURCE_EXHAUSTED.
    gate: passed by calls before their requests are parsed; None: no gate.
    tls: the certificate of the port; None: the port takes plaintext.
    health_port: another port, in plaintext, with the health service alone, for probes that cannot use TLS; 0: none.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        services: Sequence[str],
        shared_port: bool = False,
        max_connection_age_s: float | None = None,
        max_request_bytes: int = MAX_MESSAGE_BYTES,
        gate: RequestGate | None = None,
        tls: ServerTls | None = None,
        health_port: int = 0,
    ) -> None:
        self._tls = tls
        self._health_port = health_port
        self._host = host
        self._wanted_port = port
        self._services = tuple(services)
        self._shared_port = shared_port
        self.port = 0  # the bound one, once started
        keep_clients_out_of_log()
        self.grpc = grpc.aio.server(
            interceptors=(ErrorInterceptor(gate),),
            options=(
                ("grpc.max_receive_message_length", max_request_bytes),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_concurrent_streams", MAX_STREAMS_PER_CONNECTION),
                ("grpc.server_max_unrequested_time_in_server", MAX_UNACCEPTED_S),
                ("grpc.compression_enabled_algorithms_bitset", NO_COMPRESSION),
                ("grpc.so_reuseport", int(shared_port)),  # a taken port must fail, not be shared silently
                ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
                ("grpc.http2.max_ping_strikes", 0),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.keepalive_time_ms", KEEPALIVE_MS * 2),
                ("grpc.max_connection_idle_ms", int(MAX_CONNECTION_IDLE_S * 1e3)),
                ("grpc.max_allowed_incoming_connections", most_connections()),
                *(UNREAD_OPTIONS if gate is not None else ()),
                *([("grpc.max_connection_age_ms", int(max_connection_age_s * 1e3))] if max_connection_age_s else []),
            ),
        )
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        names = (*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.grpc)
        self._probed: grpc.aio.Server | None = None
        if health_port:
            self._probed = grpc.aio.server(options=(("grpc.so_reuseport", int(shared_port)), *PROBE_OPTIONS))
            health_pb2_grpc.add_HealthServicer_to_server(self._health, self._probed)

    async def start(self) -> None:
        """Binds the port and serves: the process is then alive but not ready. Raises PortInUse."""
        self.port = self._bind(self.grpc, self._wanted_port, "--port", self._tls)
        if self._probed is not None:
            self._bind(self._probed, self._health_port, "--health-port")
        await self.set_ready(False)
        await self._set(LIVENESS, True)
        await self.grpc.start()
        if self._probed is not None:
            await self._probed.start()

    async def set_ready(self, ready: bool) -> None:
        """Sets the health status of readiness, of the server and of each service."""
        for name in ("", READINESS, *self._services):
            await self._set(name, ready)

    async def stop(self, grace_s: float) -> None:
        """Stops the server: it takes no new calls, and cancels running ones after `grace_s`."""
        await self.set_ready(False)
        await self.grpc.stop(grace_s)
        if self._probed is not None:
            await self._probed.stop(0)

    def _bind(self, server: grpc.aio.Server, port: int, flag: str, tls: ServerTls | None = None) -> int:
        """Returns the bound port. Raises PortInUse."""
        if port and not self._shared_port:
            check_port_is_free(self._host, port, flag)
        host = f"[{self._host}]" if ":" in self._host else self._host
        try:
            if tls is None:
                return server.add_insecure_port(f"{host}:{port}")
            return server.add_secure_port(f"{host}:{port}", tls.grpc_credentials())
        except RuntimeError:
            raise PortInUse(f"port {port} on {self._host} is in use; choose another with {flag}") from None

    async def _set(self, name: str, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse
        await self._health.set(name, status.SERVING if serving else status.NOT_SERVING)


def keep_clients_out_of_log() -> None:
    """Drops the log lines of gRPC's library that quote clients or tell that they have gone."""
    logging.getLogger(GRPC_LOG).addFilter(_is_not_of_clients)  # adding it again has no effect


def _is_not_of_clients(record: logging.LogRecord) -> bool:
    raised = None if record.exc_info is None else record.exc_info[1]
    return record.msg != QUOTES_BYTES and not isinstance(raised, OF_CLIENTS)


class Signals:
    """SIGINT and SIGTERM as events: the first signal sets `stop`, the second one `stop_now`."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.stop_now = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(NotImplementedError):
                loop.add_signal_handler(number, self._notice)

    def _notice(self) -> None:
        if self.stop.is_set():
            self.stop_now.set()
        self.stop.set()
