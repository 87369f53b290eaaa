"""One connection to Redis that many calls share. Commands of one turn of the event loop are sent in one write, and
replies are matched in order. An abandoned call still gets its reply. redis.asyncio's own client takes a connection for
each call and would drop the reply together with the connection.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from redis.asyncio import Connection
from redis.exceptions import NoScriptError, RedisError, ResponseError

from trunkline_router.quotas.stores.redis_pool import CONNECT_TIMEOUT_S, disconnect, reason, redis_pool
from trunkline_router.quotas.stores.redis_url import PUBLIC_AUTHORITIES, RedisTls, place_of
from trunkline_router.quotas.stores.store import StoreDown
from trunkline_runtime.telemetry.bucket_counts import BucketCounts

LATENCY_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0)
NO_EVICTION = "noeviction"


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
        # Redis may contain arbitrary data.
        self._pool = redis_pool(url, tls, connect_timeout_s, decode_responses=True, encoding_errors="replace")
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
            await disconnect(connection)
            raise StoreDown(f"{self._place}: {reason(error)}") from None
        except BaseException:
            await disconnect(connection)
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
            await disconnect(connection)

    async def _write(self, connection: Connection) -> None:
        try:
            while not self._broken:  # checked because a library may swallow a cancellation
                await self._wake.wait()
                self._wake.clear()
                calls, self._to_send = self._to_send, []
                self._sent.extend(calls)
                await self._send(connection, calls)
        except Exception as error:  # whatever the error is, calls must not wait for a task that has ended
            self._fail(reason(error))

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
                    _settle(self._sent.popleft(), StoreDown(f"{self._place}: {reason(error)}"))
                else:
                    call = self._sent.popleft()
                    self.latencies[call.script.name].add(time.perf_counter() - call.asked_s)
                    _settle(call, reply)
        except Exception as error:  # as in _write: invalid replies, or replies without a call
            self._fail(reason(error))

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
