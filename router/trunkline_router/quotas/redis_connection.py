"""One connection to Redis that many calls share. Commands of one turn of the event loop are sent in one write, and
replies are matched in order. An abandoned call still gets its reply. redis.asyncio's own client takes a connection for
each call and would drop the reply together with the connection.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio import Connection, ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AskError,
    ClusterCrossSlotError,
    ClusterDownError,
    MovedError,
    NoScriptError,
    RedisError,
    ResponseError,
    TryAgainError,
)

from trunkline_router.quotas.redis_url import PUBLIC_AUTHORITIES, RedisTls, place_of
from trunkline_router.quotas.store import StoreDown
from trunkline_runtime.telemetry.series import BucketCounts

CONNECT_TIMEOUT_S = 0.5  # for DNS, TCP, TLS, the password and loading the scripts
# From a call to its reply; then the connection is closed. This also bounds the memory that a server can fill that is
# no Redis: the scripts themselves return bounded replies. The time is waited in slices, so that a delay of this
# process's own event loop counts as one slice at most.
REPLY_TIMEOUT_S, REPLY_SLICES = 1.0, 5
LATENCY_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0)
NO_EVICTION = "noeviction"
OF_A_CLUSTER = (MovedError, AskError, ClusterDownError, ClusterCrossSlotError, TryAgainError)


class Script:
    """A Lua script and the hash by which Redis knows it."""

    def __init__(self, name: str, source: str) -> None:
        self.name = name
        self.source = source
        self.sha = ""  # set when the script is loaded


class _Call:
    """A script call that was sent or is about to be sent."""

    __slots__ = ("arguments", "asked_s", "future", "script", "slices")

    def __init__(self, script: Script, arguments: tuple[Any, ...], future: "asyncio.Future[Any]") -> None:
        self.script = script
        self.arguments = arguments  # number of keys, keys, arguments
        self.future = future
        self.asked_s = time.perf_counter()
        self.slices = 0  # for which it has been the oldest call without a reply


class RedisConnection:
    """A connection to Redis that many script calls share. connect() must be called first, and again after a failure."""

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
        self._tasks: list[asyncio.Task[None]] = []
        self._broken = "not connected"  # why calls fail; "" if they do not
        self.eviction = ""  # the server's eviction policy; "" if it does not evict keys
        self._to_send: list[_Call] = []
        self._wake = asyncio.Event()
        self._sent: deque[_Call] = deque()
        self._timer: asyncio.TimerHandle | None = None  # runs while calls are without a reply
        self.latencies = {script.name: BucketCounts(LATENCY_BUCKETS) for script in scripts}  # to the reply

    @property
    def is_connected(self) -> bool:
        return not self._broken

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
        except (RedisError, OSError, TimeoutError, ValueError, RecursionError) as error:
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
        if self._broken:
            future.set_exception(StoreDown(f"{self._place}: {self._broken}"))
            future.exception()  # marks it as retrieved, because the caller may have stopped waiting
            return future
        self._to_send.append(_Call(script, (len(keys), *keys, *arguments), future))
        self._wake.set()
        if self._timer is None:
            self._wait_a_slice()
        return future

    async def close(self) -> None:
        """Closes the connection. Calls without a reply fail."""
        self._fail("the connection was closed")
        connection, tasks = self._connection, self._tasks
        self._connection, self._tasks = None, []
        await asyncio.gather(*tasks, return_exceptions=True)
        if connection is not None:  # a task that was cancelled before it began has not closed it
            await _disconnect(connection)

    async def _write(self, connection: Connection) -> None:
        try:
            while not self._broken:  # checked because a library may swallow a cancellation
                await self._wake.wait()
                self._wake.clear()
                calls, self._to_send = self._to_send, []
                self._sent.extend(calls)
                commands = [("EVALSHA", call.script.sha, *call.arguments) for call in calls]
                await connection.send_packed_command(connection.pack_commands(commands), check_health=False)
        except Exception as error:  # whatever the error is, calls must not wait for a task that has ended
            self._fail(_reason(error))

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
        finally:
            await _disconnect(connection)

    def _wait_a_slice(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._reply_timeout_s / REPLY_SLICES, self._slice_is_over)

    def _slice_is_over(self) -> None:
        """Closes the connection if its oldest call has no reply in time."""
        self._timer = None
        oldest = next(iter(self._sent or self._to_send), None)
        if oldest is None:
            return
        oldest.slices += 1
        if oldest.slices >= REPLY_SLICES:
            self._fail(f"no answer within {self._reply_timeout_s:g} s")
        else:
            self._wait_a_slice()

    def _fail(self, reason: str) -> None:
        self._broken = self._broken or reason
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
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


def _eviction(info: str) -> str:
    """The eviction policy in a reply to INFO; "" if the server never evicts keys."""
    settings = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    policy = settings.get("maxmemory_policy", NO_EVICTION)
    return "" if policy == NO_EVICTION or settings.get("maxmemory") == "0" else policy
