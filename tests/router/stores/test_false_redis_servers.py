"""Whatever answers on the port of Redis, and however: no request fails for it or waits longer than its patience, and
the router does not go on reading an answer that does not end."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

import pytest
from redis.asyncio import Redis

from tests.router.cluster import until
from tests.router.running_routers import RunningRouter, running
from tests.router.shared_state_rig import PREFIX, keys_in
from trunkline_bench.servers.redis_server import RedisServer
from trunkline_router.quotas.quota import Quotas

QUOTAS = Quotas(requests_per_minute=5)
HUGE_BYTES = 512 << 20
LONGEST_ANSWER_S = 5.0  # the router closes the connection after 0.5 or 1 s; a machine can be busy
PAUSE_S = 0.01  # between MiB, so that the tests need little memory
SHA = b"$40\r\n" + b"a" * 40 + b"\r\n"
MIB = b"x" * (1 << 20)

Answer = Callable[[bytes], AsyncIterator[bytes]]  # to a command, in the pieces in which it is sent


async def http(command: bytes) -> AsyncIterator[bytes]:
    yield b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


async def silence(command: bytes) -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


async def drip(command: bytes) -> AsyncIterator[bytes]:
    """A byte in every 10 ms, which is no end of one answer within anybody's patience."""
    while True:
        yield b"$"
        await asyncio.sleep(0.01)


async def huge_text(command: bytes) -> AsyncIterator[bytes]:
    yield b"$%d\r\n" % HUGE_BYTES
    for _ in range(HUGE_BYTES // len(MIB)):
        yield MIB


async def endless_line(command: bytes) -> AsyncIterator[bytes]:
    yield b"+"
    for _ in range(HUGE_BYTES // len(MIB)):
        yield MIB


async def huge_list(command: bytes) -> AsyncIterator[bytes]:
    yield b"*1000000000\r\n"
    for _ in range(HUGE_BYTES // len(MIB)):
        yield b":1\r\n" * (len(MIB) // 4)


async def deep_list(command: bytes) -> AsyncIterator[bytes]:
    yield b"*1\r\n" * 100_000


async def nonsense(command: bytes) -> AsyncIterator[bytes]:
    yield b"\x00\xff\r\n%8^\r\n" * 100


async def negative(command: bytes) -> AsyncIterator[bytes]:
    yield b"$-77\r\n*-5\r\n:9\r\n"


async def wrong_shape(command: bytes) -> AsyncIterator[bytes]:
    yield b"*3\r\n:1\r\n$2\r\n{}\r\n*0\r\n"


async def no_shape(command: bytes) -> AsyncIterator[bytes]:
    yield b"*1\r\n$9\r\n[1, null]\r\n"


async def null(command: bytes) -> AsyncIterator[bytes]:
    yield b"*-1\r\n"


async def refusal(command: bytes) -> AsyncIterator[bytes]:
    yield b"-NOAUTH Authentication required.\r\n"


async def denial(command: bytes) -> AsyncIterator[bytes]:
    yield b"-NOPERM this user has no permissions to run the 'evalsha' command\r\n"


async def more_than_was_asked(command: bytes) -> AsyncIterator[bytes]:
    yield b"+OK\r\n" * 5000


ANSWERS: dict[str, Answer] = {
    answer.__name__: answer
    for answer in (http, silence, drip, huge_text, endless_line, huge_list, deep_list, nonsense, negative, wrong_shape,
                   no_shape, null, refusal, denial, more_than_was_asked)
}  # fmt: skip


class FalseRedis:
    """Answers like Redis until scripts are called, or never does; `longest_s` is the time for which it could send one
    answer."""

    def __init__(self, answer: Answer, *, is_redis_at_first: bool) -> None:
        self._answer = answer
        self._is_redis_at_first = is_redis_at_first
        self.url = ""
        self.longest_s = 0.0
        self.struck = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                command = await self._command(reader)
                if self._is_redis_at_first and command[0] not in (b"EVALSHA", b"EVAL"):
                    known = {b"SCRIPT": SHA, b"INFO": b"$0\r\n\r\n"}
                    writer.write(known.get(command[0], b"+OK\r\n"))
                    continue
                began_s, self.struck = time.monotonic(), self.struck + 1
                async for piece in self._answer(command[0]):
                    writer.write(piece)
                    await writer.drain()
                    self.longest_s = max(self.longest_s, time.monotonic() - began_s)
                    if len(piece) >= len(MIB):
                        await asyncio.sleep(PAUSE_S)
        writer.transport.abort()

    async def _command(self, reader: asyncio.StreamReader) -> list[bytes]:
        parts = []
        for _ in range(int((await reader.readuntil(b"\r\n"))[1:])):
            size = int((await reader.readuntil(b"\r\n"))[1:])
            parts.append((await reader.readexactly(size + 2))[:-2])
        return parts


@contextlib.asynccontextmanager
async def false_redis(answer: Answer, *, is_redis_at_first: bool) -> AsyncIterator[FalseRedis]:
    false, serving = FalseRedis(answer, is_redis_at_first=is_redis_at_first), set[asyncio.Task[None]]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        try:
            await false.serve(reader, writer)
        except asyncio.CancelledError:
            writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    false.url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
    try:
        yield false
    finally:
        server.close()
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


@pytest.mark.parametrize("is_redis_at_first", [False, True], ids=["from the first word on", "to scripts"])
@pytest.mark.parametrize("name", ANSWERS)
async def test_no_request_fails_before_a_server_that_is_no_redis(name: str, is_redis_at_first: bool) -> None:
    async with false_redis(ANSWERS[name], is_redis_at_first=is_redis_at_first) as false:
        async with asyncio.timeout(60):
            async with running(false.url, "a") as (router,):
                assert [await router.admits(QUOTAS) for _ in range(6)] == [True] * 5 + [False], "by its own book"
                await until(lambda: false.struck >= 2)
                assert not router.is_reachable
        assert false.longest_s <= LONGEST_ANSWER_S


async def test_a_wrong_password_costs_no_request() -> None:
    with RedisServer(password="right") as redis:
        async with running(redis.url.replace("right", "wrong"), "a") as (router,):
            assert [await router.admits(QUOTAS) for _ in range(6)] == [True] * 5 + [False]
            assert not router.is_reachable


async def test_huge_values_under_any_key_are_cleared_and_never_sent() -> None:
    """Of 8 MiB; one of 512 takes Redis a quarter of a second to copy."""
    huge = "x" * (8 << 20)
    with RedisServer() as redis:
        async with Redis.from_url(redis.url, decode_responses=True) as client, running(redis.url, "a") as (router,):
            assert await router.admits(QUOTAS)
            keys = await keys_in(client)
            for name in ("routers", "credits", "versions", "leases", "served"):
                await client.hset(keys + name, "huge", huge)
                await client.hset(keys + name, huge, "1|[]")
                await settled(router)
            for name in ("window:t", "flight:t"):
                for field in ("r", "huge"):
                    await client.hset(keys + name, field, huge)
                    await settled(router)
                    use_of = [await router.admits(QUOTAS) for _ in range(2)]
                    assert use_of != [], "answered, whichever way"
            await client.zadd(f"{PREFIX}convictions", {huge: 1e15})
            await settled(router)
            await client.set(f"{PREFIX}life", huge)
            await settled(router)
            assert await client.strlen(f"{PREFIX}life") < 1000


async def settled(router: RunningRouter) -> None:
    """It and Redis have informed each other since; perhaps after Redis was slow once."""
    for _ in range(2):
        syncs = router.syncs
        router.sync.beat_next()
        await until(lambda: router.syncs > syncs)  # noqa: B023


async def test_keys_that_somebody_made_eternal_expire_again() -> None:
    with RedisServer() as redis:
        async with Redis.from_url(redis.url, decode_responses=True) as client, running(redis.url, "a") as (router,):
            router.convict(b"\x01" * 16)
            assert await router.admits(QUOTAS)
            await settled(router)
            for _ in range(2):
                for key in await client.keys():
                    await client.persist(key)
                assert await router.admits(QUOTAS)
                await settled(router)
                eternal = [key for key in await client.keys() if await client.pttl(key) < 0]
                assert not eternal, eternal
