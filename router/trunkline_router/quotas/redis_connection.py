"""One connection to Redis that many calls share. Calls that come together are sent together; those that come meanwhile
are sent next, so a call takes two round trips at most. An abandoned call still gets its reply. redis.asyncio's own
client would take a connection for each call, which costs a request 70 µs more.
"""

import asyncio
import contextlib
import hashlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from redis.asyncio import Connection, ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AskError, ClusterDownError, RedisError

from trunkline_router.quotas.redis_url import PUBLIC_AUTHORITIES, RedisTls, place_of
from trunkline_router.quotas.store import StoreDown
from trunkline_runtime.telemetry.series import BucketCounts

CONNECT_TIMEOUT_S = 0.5  # for DNS, TCP, TLS, the password and loading the scripts
# For the replies to calls that were sent together; then the connection is closed. This also bounds the memory that a
# server can fill that is no Redis: the scripts themselves return bounded replies.
REPLY_TIMEOUT_S = 1.0
LATENCY_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0)
OF_A_CLUSTER = (AskError, ClusterDownError)  # AskError: MOVED, too


class Script:
    """A Lua script and the hash by which Redis knows it.

    read: returns what a call gets for a reply; if it raises an error, the connection is closed
    """

    def __init__(self, name: str, source: str, read: Callable[[Any], Any] = lambda reply: reply) -> None:
        self.name = name
        self.source = source
        self.read = read
        self.sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


class _Call(NamedTuple):
    script: Script
    arguments: tuple[Any, ...]  # number of keys, keys, arguments
    future: "asyncio.Future[Any]"
    asked_s: float


class RedisConnection:
    """A connection to Redis that many script calls share. connect() must be called first, and again after a failure.
    An error reply is a failure, too: the server may be full, a replica by now, or have lost its scripts."""

    def __init__(
        self,
        url: str,
        scripts: Sequence[Script],
        *,
        tls: RedisTls = PUBLIC_AUTHORITIES,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        reply_timeout_s: float = REPLY_TIMEOUT_S,
    ) -> None:
        self._place = place_of(url)
        self._connect_timeout_s, self._reply_timeout_s = connect_timeout_s, reply_timeout_s
        self._scripts = scripts
        scheme = urlsplit(url).scheme
        of_scheme: dict[str, Any] = {"socket_keepalive": True} if scheme != "unix" else {}  # a Unix socket has none
        if scheme == "rediss":
            of_scheme |= tls.options()
        self._pool = ConnectionPool.from_url(
            url,
            protocol=2,
            socket_connect_timeout=connect_timeout_s,
            socket_timeout=None,  # with a timeout of the library each write would start a task
            retry=Retry(NoBackoff(), 0),
            decode_responses=True,
            encoding_errors="replace",  # Redis may contain arbitrary data
            **of_scheme,
        )
        self._connection: Connection | None = None
        self._problem = "not connected"  # why calls fail; "" if they do not
        self._calls: deque[_Call] = deque()  # without a reply, oldest first
        self._has_calls = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None
        self.latencies = {script.name: BucketCounts(LATENCY_BUCKETS) for script in scripts}  # to the reply

    @property
    def is_connected(self) -> bool:
        return not self._problem

    async def connect(self) -> None:
        """Connects, or reconnects. Raises StoreDown if the server cannot be reached or used in time."""
        await self.close()
        connection: Connection = self._pool.make_connection()  # type: ignore[no-untyped-call]
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await connection.connect()  # type: ignore[no-untyped-call]
                for script in self._scripts:
                    await connection.send_command("SCRIPT", "LOAD", script.source)
                    await connection.read_response()
        except BaseException as error:
            await _disconnect(connection)
            if not isinstance(error, (RedisError, OSError, TimeoutError, ValueError, RecursionError)):
                raise
            raise StoreDown(f"{self._place}: {_reason(error)}") from None
        self._connection, self._problem = connection, ""
        self._has_calls.clear()
        self._serving = asyncio.create_task(self._serve(connection))

    def call(self, script: Script, keys: Sequence[str], arguments: Sequence[str | int]) -> "asyncio.Future[Any]":
        """Calls a script. The future gets the reply even if its caller has stopped waiting. It fails with StoreDown."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls.append(_Call(script, (len(keys), *keys, *arguments), future, time.perf_counter()))
        self._has_calls.set()
        if self._problem:
            self._fail(self._problem)
        return future

    async def close(self) -> None:
        """Closes the connection. Calls without a reply fail."""
        self._fail("the connection was closed")
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
            self._serving = None
        if self._connection is not None:  # a task that was cancelled before it began has not closed it
            await _disconnect(self._connection)
            self._connection = None

    async def _serve(self, connection: Connection) -> None:
        try:
            while not self._problem:  # checked because a library may swallow a cancellation
                await self._has_calls.wait()
                self._has_calls.clear()
                async with asyncio.timeout(self._reply_timeout_s):
                    await self._exchange(connection, tuple(self._calls))
        except Exception as error:  # whatever the error is, calls must not wait for a task that has ended
            self._fail(_reason(error))
        finally:
            await _disconnect(connection)

    async def _exchange(self, connection: Connection, calls: Sequence[_Call]) -> None:
        """Sends calls, and reads their replies."""
        commands = [("EVALSHA", call.script.sha, *call.arguments) for call in calls]
        await connection.send_packed_command(connection.pack_commands(commands), check_health=False)
        for call in calls:
            reply = call.script.read(await connection.read_response())
            self._calls.popleft()
            self.latencies[call.script.name].add(time.perf_counter() - call.asked_s)
            if not call.future.done():
                call.future.set_result(reply)

    def _fail(self, reason: str) -> None:
        self._problem = self._problem or reason
        while self._calls:
            future = self._calls.popleft().future
            if not future.done():
                future.set_exception(StoreDown(f"{self._place}: {reason}"))
                future.exception()  # marks it as retrieved, because the caller may have stopped waiting


async def _disconnect(connection: Connection) -> None:
    """Closes a connection, whatever state it is in."""
    with contextlib.suppress(RedisError, OSError):
        await connection.disconnect(nowait=True)


def _reason(error: BaseException) -> str:
    """The error in one line, without credentials."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, OF_A_CLUSTER):
        return "the server is a Redis Cluster node, which is not supported: --redis-url must name a single primary"
    return str(error).splitlines()[0] if str(error) else type(error).__name__
