"""Views of the API keys in one real Redis, as routers and commands with different secrets have them."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import redis.asyncio

from trunkline_bench.servers.redis_server import RedisServer
from trunkline_router.access.identity.fleet_secret import FleetSecret, Seal
from trunkline_router.access.identity.redis_keys import SEAL_PURPOSE
from trunkline_router.access.keys.redis_key_writer import RedisKeyWriter

FIRST, SECOND = b"a fleet secret of thirty-two bytes", b"another secret of thirty-two bytes"
RECORDS, VERSION = "{trunkline}:api-keys:1", "{trunkline}:api-keys:1:version"

Opened = Callable[..., RedisKeyWriter]


def seal_of(*secrets: bytes) -> Seal:
    """The seal of a fleet with these secrets, newest first."""
    return FleetSecret(secrets[0], secrets[1:]).seal(SEAL_PURPOSE)


@contextmanager
def running_redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@asynccontextmanager
async def emptied(server: RedisServer) -> AsyncIterator[Any]:
    """A client of Redis, which is empty."""
    client = redis.asyncio.from_url(server.url)
    await client.flushall()
    try:
        yield client
    finally:
        await client.aclose()


@asynccontextmanager
async def views(server: RedisServer) -> AsyncIterator[Opened]:
    """Opens views of the keys; all are closed at the end. They wait longer for a server on a busy machine."""
    made: list[RedisKeyWriter] = []

    def opened(*secrets: bytes, **options: Any) -> RedisKeyWriter:
        patient = {"connect_timeout_s": 10.0, **options}
        made.append(RedisKeyWriter(server.url, "trunkline:", seal_of(*(secrets or (FIRST,))), **patient))
        return made[-1]

    try:
        yield opened
    finally:
        for keys in made:
            await keys.close()
