"""Shared state over TLS: a real Redis behind a proxy that ends TLS, as managed ones are."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.certificates import Authority, TlsDirectory
from tests.router.relay import Relay
from trunkline_bench.servers.redis_server import RedisServer
from trunkline_router.quotas.redis_connection import RedisConnection, Script
from trunkline_router.quotas.redis_url import RedisTls
from trunkline_router.quotas.store import StoreDown
from trunkline_runtime.tls import ServerTls, TlsFiles

PING = Script("ping", "return 'pong'")


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@asynccontextmanager
async def tls_before(redis: RedisServer, files: TlsDirectory) -> AsyncIterator[int]:
    """The port of a proxy that demands client certificates."""
    context: ssl.SSLContext = ServerTls(TlsFiles(files.cert, files.key, files.ca)).ssl_context()
    async with Relay(redis.port, tls=context) as relay:
        yield int(relay.address.rpartition(":")[2])


async def pong(port: int, tls: RedisTls, host: str = "localhost", query: str = "") -> str:
    """What Redis answers. Raises StoreDown."""
    connection = RedisConnection(f"rediss://{host}:{port}/0{query}", (PING,), tls=tls, connect_timeout_s=60.0)
    try:
        await connection.connect()
        return str(await asyncio.wait_for(connection.call(PING, (), ()), 60))
    finally:
        await connection.close()


async def problem(port: int, tls: RedisTls, host: str = "localhost") -> str:
    with pytest.raises(StoreDown) as caught:
        await pong(port, tls, host)
    return str(caught.value)


async def test_routers_reach_redis_over_tls_and_nothing_else_does(redis: RedisServer, tmp_path: Path) -> None:
    authority, other = Authority("one"), Authority("two")

    def files(name: str, pair_of: Authority, trusted: Authority, *names: str) -> TlsDirectory:
        return TlsDirectory(tmp_path / name).write(pair_of.issue(*names), trusted.pem)

    def tls(made: TlsDirectory) -> RedisTls:
        return RedisTls(made.ca, made.cert, made.key)

    server, router = files("redis", authority, authority, "localhost"), files("r", authority, authority, "router")
    async with tls_before(redis, server) as port:
        assert await pong(port, tls(router)) == "pong"
        assert "VERIFY_FAILED" in await problem(port, tls(files("x", authority, other, "router")))
        assert "VERIFY_FAILED" in await problem(port, RedisTls()), "public authorities do not know it"
        assert "IP address mismatch" in await problem(port, tls(router), "127.0.0.1")
        await problem(port, RedisTls(router.ca))
        await problem(port, tls(files("y", other, authority, "router")))
        files("redis", other, other, "localhost")
        await problem(port, tls(router))
        files("r", other, other, "router")
        assert await pong(port, tls(router)) == "pong", "rotated: each connection reads the files again"
