"""Shared state through a Unix socket: a Redis beside the router on one host."""

import asyncio
from pathlib import Path

from trunkline_bench.servers.redis_server import RedisServer
from trunkline_router.quotas.redis_connection import RedisConnection, Script

PING = Script("ping", "return 'pong'")


async def test_a_redis_is_reached_through_its_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "redis.sock"
    with RedisServer(options=["--unixsocket", str(path)]):
        connection = RedisConnection(f"unix://{path}", (PING,), connect_timeout_s=60.0)
        try:
            await connection.connect()
            assert await asyncio.wait_for(connection.call(PING, (), ()), 60) in (b"pong", "pong")
        finally:
            await connection.close()
