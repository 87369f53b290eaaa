"""Connections to Redis with bounded replies. redis.asyncio makes the connections."""

import contextlib
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
    RedisError,
    TryAgainError,
)

from trunkline_router.quotas.stores.redis_url import RedisTls

CONNECT_TIMEOUT_S = 0.5  # for DNS, TCP, TLS, the password and loading the scripts
MOST_REPLY_BYTES = 8 << 20  # sync.lua returns at most five times half a MiB before JSON escapes some characters
MOST_REPLY_PARTS = 4096  # parts of 32 KiB or of one router's credits; each is read in a turn of its own
OF_A_CLUSTER = (MovedError, AskError, ClusterDownError, ClusterCrossSlotError, TryAgainError)


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


def redis_pool(url: str, tls: RedisTls, connect_timeout_s: float, **options: Any) -> ConnectionPool:
    """A pool whose make_connection() returns new connections.  options: further ones of redis.asyncio's connections"""
    scheme = urlsplit(url).scheme
    of_scheme: dict[str, Any] = {"socket_keepalive": True} if scheme != "unix" else {}  # a Unix socket has none
    if scheme == "rediss":
        of_scheme |= tls.options()
    return ConnectionPool.from_url(
        url,
        protocol=2,
        socket_connect_timeout=connect_timeout_s,
        socket_timeout=None,  # callers have their own timeouts; with this one, each write would start a task
        retry=Retry(NoBackoff(), 0),
        parser_class=BoundedParser,
        **of_scheme,
        **options,
    )


async def disconnect(connection: Connection) -> None:
    """Closes a connection, whatever state it is in."""
    with contextlib.suppress(RedisError, OSError):
        await connection.disconnect(nowait=True)


def reason(error: BaseException) -> str:
    """The error in one line, without credentials."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, OF_A_CLUSTER):
        return "the server is a Redis Cluster node, which is not supported: --redis-url must name a single primary"
    return str(error).splitlines()[0] if str(error) else type(error).__name__
