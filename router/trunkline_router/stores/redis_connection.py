"""One connection to Redis that many calls share. Commands of one turn of the event loop are sent in one write, and
replies are matched in order. An abandoned call still gets its reply. redis.asyncio's own client takes a connection for
each call and would drop the reply together with the connection.
"""

import asyncio
import contextlib
import ssl
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from redis._parsers.resp2 import _AsyncRESP2Parser
from redis.asyncio import Connection, ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AskError,
    ClusterCrossSlotError,
    ClusterDownError,
    InvalidResponse,
    MovedError,
    NoScriptError,
    RedisError,
    ResponseError,
    TryAgainError,
)

from trunkline.tls_files import read_authorities, read_pair
from trunkline_router.stores.store import StoreDown
from trunkline_runtime.telemetry.bucket_counts import BucketCounts

CONNECT_TIMEOUT_S = 0.5  # for DNS, TCP, TLS, the password and loading the scripts
MOST_REPLY_BYTES = 8 << 20  # sync.lua returns at most five times half a MiB before JSON escapes some characters
MOST_REPLY_PARTS = 4096  # parts of 32 KiB or of one router's credits; each is read in a turn of its own
OF_A_CLUSTER = (MovedError, AskError, ClusterDownError, ClusterCrossSlotError, TryAgainError)
LATENCY_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0)
NO_EVICTION = "noeviction"
SCHEMES = ("redis", "rediss", "unix")


@dataclass(frozen=True, slots=True)
class RedisTls:
    """Files for TLS to Redis, in PEM. Each connection reads them again."""

    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""

    def check(self) -> None:
        """Raises TlsFileError if a file cannot be used now."""
        if self.ca_file:
            read_authorities(self.ca_file)
        if self.cert_file:
            read_pair(self.cert_file, self.key_file)

    def options(self) -> dict[str, Any]:
        """Of a connection. Those in the URL, such as ssl_cert_reqs, take precedence."""
        return {
            "ssl_ca_certs": self.ca_file or None,
            "ssl_certfile": self.cert_file or None,
            "ssl_keyfile": self.key_file or None,
            "ssl_check_hostname": True,
            "ssl_min_version": ssl.TLSVersion.TLSv1_2,
        }


PUBLIC_AUTHORITIES = RedisTls()  # the system's, without a certificate of the router's own


def redis_url_problem(url: str) -> str | None:
    """What is wrong with --redis-url, or None. The message does not repeat the URL, which may contain a password."""
    allowed = "allowed: redis://[user:password@]host:port/db, rediss:// for TLS, unix:///path"
    try:
        parts = urlsplit(url)
        has_target = bool(parts.path if parts.scheme == "unix" else parts.hostname)
        fits = parts.scheme in SCHEMES and has_target and parts.port != 0
    except ValueError:
        fits = False
    if not fits:
        return f"--redis-url is not the URL of a Redis; {allowed}"
    try:
        ConnectionPool.from_url(url)
    except (ValueError, TypeError, RedisError):
        return f"--redis-url has an invalid option; {allowed}"
    return None


def place_of(url: str) -> str:
    """The host and port, or the socket path, of the URL, for logs."""
    parts = urlsplit(url)
    return parts.path if parts.scheme == "unix" else f"{parts.hostname}:{parts.port or 6379}"


class BoundedParser(_AsyncRESP2Parser):
    """Rejects a reply that is larger than any reply of the scripts, before it is in memory."""

    _lines = 0  # of the current reply

    async def read_response(self, disable_decoding: bool = False) -> Any:
        self._lines = 0
        try:
            return await super().read_response(disable_decoding)
        except (RecursionError, ValueError) as error:
            raise InvalidResponse(f"a reply that is not in Redis's protocol: {type(error).__name__}") from None

    async def _read(self, length: int) -> bytes:
        self._check(length)
        return bytes(await super()._read(length))

    async def _readline(self) -> bytes:
        self._lines += 1
        self._check(0)
        return bytes(await super()._readline())

    def _check(self, length: int) -> None:
        if self._pos + length > MOST_REPLY_BYTES or self._lines > MOST_REPLY_PARTS:
            raise InvalidResponse(f"a reply of more than {MOST_REPLY_BYTES} bytes or {MOST_REPLY_PARTS} parts")


class Script:
    """A Lua script and the hash by which Redis knows it."""

    def __init__(self, name: str, source: str) -> None:
        self.name = name
        self.source = source
        self.sha = ""  # set when the script is loaded


class _Call:
    """A script call that was sent or is about to be sent."""

    __slots__ = ("arguments", "asked_s", "future", "script")

    def __init__(self, script: Script, arguments: tuple[Any, ...], future: "asyncio.Future[Any]") -> None:
        self.script = script
        self.arguments = arguments  # number of keys, keys, arguments
        self.future = future
        self.asked_s = time.perf_counter()


class RedisConnection:
    """A connection to Redis that many script calls share. connect() must be called first, and again after a failure."""

    def __init__(
        self,
        url: str,
        scripts: Sequence[Script],
        *,
        tls: RedisTls = PUBLIC_AUTHORITIES,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        self._place = place_of(url)
        self._connect_timeout_s = connect_timeout_s
        self._scripts = scripts
        self._pool = ConnectionPool.from_url(
            url,
            protocol=2,
            decode_responses=True,
            encoding_errors="replace",  # Redis may contain arbitrary data
            socket_connect_timeout=connect_timeout_s,
            socket_timeout=None,  # callers have their own timeouts; with this one, each write would start a task
            socket_keepalive=True,
            retry=Retry(NoBackoff(), 0),
            parser_class=BoundedParser,
            **(tls.options() if urlsplit(url).scheme == "rediss" else {}),
        )
        self._connection: Connection | None = None
        self._broken = ""  # why the connection has failed; "" if it has not
        self.eviction = ""  # the server's eviction policy; "" if it does not evict keys
        self._tasks: list[asyncio.Task[None]] = []
        self._to_send: list[_Call] = []
        self._wake = asyncio.Event()
        self._sent: deque[_Call] = deque()
        self.latencies = {script.name: BucketCounts(LATENCY_BUCKETS) for script in scripts}  # to the reply

    @property
    def is_connected(self) -> bool:
        return self._connection is not None and not self._broken

    async def connect(self) -> None:
        """Connects, or reconnects. Raises StoreDown if the server cannot be reached or used in time."""
        await self.close()
        connection: Connection = self._pool.make_connection()  # type: ignore[no-untyped-call]
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await connection.connect()  # type: ignore[no-untyped-call]
                for script in self._scripts:
                    await connection.send_command("SCRIPT", "LOAD", script.source)
                    script.sha = str(await connection.read_response())
                await connection.send_command("INFO", "memory")
                self.eviction = _eviction(str(await connection.read_response()))
        except (RedisError, OSError, TimeoutError) as error:
            await _disconnect(connection)
            raise StoreDown(f"{self._place}: {_reason(error)}") from None
        except BaseException:
            await _disconnect(connection)
            raise
        self._connection, self._broken = connection, ""
        self._wake.clear()
        self._tasks = [asyncio.create_task(self._write(connection)), asyncio.create_task(self._read(connection))]

    def call(self, script: Script, keys: Sequence[str], arguments: Sequence[str | int]) -> "asyncio.Future[Any]":
        """Calls a script. The future gets the reply even if its caller has stopped waiting. It fails with StoreDown."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if not self.is_connected:
            future.set_exception(StoreDown(f"{self._place}: {self._broken or 'not connected'}"))
            future.exception()  # marks it as retrieved, because the caller may have stopped waiting
            return future
        self._to_send.append(_Call(script, (len(keys), *keys, *arguments), future))
        self._wake.set()
        return future

    async def close(self) -> None:
        """Closes the connection. Calls without a reply fail."""
        connection, tasks = self._connection, self._tasks
        self._fail("the connection was closed")
        self._connection, self._tasks = None, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if connection is not None:
            await _disconnect(connection)

    async def _write(self, connection: Connection) -> None:
        try:
            while not self._broken:  # checked because a library may swallow a cancellation
                await self._wake.wait()
                self._wake.clear()
                calls, self._to_send = self._to_send, []
                self._sent.extend(calls)
                await self._send(connection, calls)
        except Exception as error:  # whatever the error is, calls must not wait for a task that has ended
            self._fail(_reason(error))

    async def _send(self, connection: Connection, calls: Sequence[_Call]) -> None:
        commands = [("EVALSHA", call.script.sha, *call.arguments) for call in calls]
        await connection.send_packed_command(connection.pack_commands(commands), check_health=False)

    async def _read(self, connection: Connection) -> None:
        try:
            while not self._broken:
                try:
                    reply = await connection.read_response()
                except NoScriptError:
                    # Redis lost its scripts through SCRIPT FLUSH or a failover. Send the source instead, after the
                    # calls that are on their way; this also loads the script again.
                    call = self._sent.popleft()
                    self._sent.append(call)
                    command = connection.pack_command("EVAL", call.script.source, *call.arguments)
                    await connection.send_packed_command(command, check_health=False)
                except ResponseError as error:
                    _settle(self._sent.popleft(), StoreDown(f"{self._place}: {_reason(error)}"))
                else:
                    call = self._sent.popleft()
                    self.latencies[call.script.name].add(time.perf_counter() - call.asked_s)
                    _settle(call, reply)
        except Exception as error:  # as in _write: invalid replies, or replies without a call
            self._fail(_reason(error))

    def _fail(self, reason: str) -> None:
        self._broken = self._broken or reason
        self._wake.set()
        calls = [*self._sent, *self._to_send]
        self._sent.clear()
        self._to_send = []
        for call in calls:
            _settle(call, StoreDown(f"{self._place}: {reason}"))


def _settle(call: _Call, reply: Any) -> None:
    if call.future.done():
        return
    if isinstance(reply, Exception):
        call.future.set_exception(reply)
        call.future.exception()  # marks it as retrieved, because the caller may have stopped waiting
    else:
        call.future.set_result(reply)


def _eviction(info: str) -> str:
    """The eviction policy in a reply to INFO; "" if the server never evicts keys."""
    settings = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    policy = settings.get("maxmemory_policy", NO_EVICTION)
    return "" if policy == NO_EVICTION or settings.get("maxmemory") == "0" else policy


async def _disconnect(connection: Connection) -> None:
    with contextlib.suppress(RedisError, OSError):
        await connection.disconnect(nowait=True)


def _reason(error: BaseException) -> str:
    """The error in one line, without credentials."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, OF_A_CLUSTER):
        return "the server is a Redis Cluster node, which is not supported: --redis-url must name a single primary"
    return str(error).splitlines()[0] if str(error) else type(error).__name__
