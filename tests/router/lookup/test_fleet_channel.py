"""The connections on which routers hear each other. Redis is real; the time is not."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from random import Random

import pytest
import redis.asyncio

from tests.router.cluster import PATIENCE_S, until
from tests.router.relay import Relay
from trunkline_bench.servers.redis_server import RedisServer
from trunkline_router.observe.lookup.fleet_channel import BACKOFF_MOST_S, LISTENER_AGE_S, FleetChannel

HEARD = b"heard"


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[RedisServer, RedisServer]]:
    with RedisServer() as one, RedisServer() as other:
        yield one, other


@asynccontextmanager
async def listening(name: Relay, heard: list[bytes], steady_s: Callable[[], float]) -> AsyncIterator[FleetChannel]:
    channel = FleetChannel(f"redis://{name.address}/0", {HEARD: heard.append}, rng=Random(0), steady_s=steady_s)
    running = asyncio.create_task(channel.run())
    await until(lambda: channel.is_listening)
    yield channel
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def publish(server: RedisServer, *messages: bytes) -> int:
    """Returns how many connections hear the last message."""
    hearing = 0
    async with redis.asyncio.from_url(server.url) as client:
        for message in messages:
            hearing = await client.publish(HEARD, message)
    return hearing


async def until_nobody_listens(server: RedisServer) -> None:
    async with redis.asyncio.from_url(server.url) as client, asyncio.timeout(PATIENCE_S):
        while (await client.pubsub_numsub(HEARD))[0][1]:
            pass


async def test_a_listener_follows_the_name_of_redis_to_another_server(
    servers: tuple[RedisServer, RedisServer],
) -> None:
    (old, new), heard, now_s = servers, list[bytes](), 100.0
    async with Relay(old.port) as name, listening(name, heard, lambda: now_s) as channel:
        name.target_port = new.port
        now_s += LISTENER_AGE_S / 2 - 1
        assert await publish(old, b"young") == 1
        await until(lambda: heard == [b"young"])
        assert channel.num_connections == 1, "the connection is not old enough"
        now_s += LISTENER_AGE_S
        await publish(old, b"old")  # or the answer to a ping, at the latest after 30 s
        await until(lambda: channel.num_connections == 2)
        assert channel.is_listening
        channel.send(HEARD, b"new")
        await until(lambda: b"new" in heard)
        await until_nobody_listens(old)
        assert heard == [b"young", b"old", b"new"]


async def test_while_a_listener_is_replaced_no_message_is_lost(servers: tuple[RedisServer, RedisServer]) -> None:
    (one, _), heard, now_s = servers, list[bytes](), 100.0
    sent = [f"{number}".encode() for number in range(400)]
    async with Relay(one.port) as name, listening(name, heard, lambda: now_s) as channel:
        for first in range(0, 400, 100):
            now_s += LISTENER_AGE_S
            opened = channel.num_connections
            assert await publish(one, *sent[first : first + 100])
            await until(lambda opened=opened: channel.num_connections > opened)  # type: ignore[misc]
        await until(lambda: set(heard) == set(sent))
        assert channel.is_listening


async def test_a_listener_goes_on_while_the_name_leads_nowhere(servers: tuple[RedisServer, RedisServer]) -> None:
    nothing = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    (old, new), heard, now_s = servers, list[bytes](), 100.0
    async with Relay(old.port) as name, listening(name, heard, lambda: now_s) as channel:
        name.target_port = nothing.sockets[0].getsockname()[1]
        now_s += LISTENER_AGE_S
        await publish(old, b"1")
        await publish(old, b"2")
        await until(lambda: heard == [b"1", b"2"])
        assert (channel.is_listening, channel.num_connections) == (True, 1)
        name.target_port = new.port
        now_s += BACKOFF_MOST_S
        await publish(old, b"3")
        await until(lambda: channel.num_connections == 2)
        channel.send(HEARD, b"4")
        await until(lambda: heard == [b"1", b"2", b"3", b"4"])
    nothing.close()
    await nothing.wait_closed()
