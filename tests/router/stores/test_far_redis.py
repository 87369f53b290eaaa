"""A Redis that is far away is used, where requests are given the patience for it."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from random import Random

import pytest

from tests.router.cluster import until
from tests.router.shared_state_rig import FakeFleet, link_of, use
from trunkline.status import RequestRefused
from trunkline_bench.servers.redis_server import RedisServer
from trunkline_router.assembly import share
from trunkline_router.main import router_settings
from trunkline_router.quotas.admission import RequestUse
from trunkline_router.quotas.quota import Quotas
from trunkline_router.quotas.redis_store import RedisStore
from trunkline_router.quotas.shared_state import SharedState


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@asynccontextmanager
async def far_from(port: int, round_trip_s: float) -> AsyncIterator[int]:
    """A port that leads to another one, half the time away each way, at any throughput."""
    loop = asyncio.get_running_loop()
    tasks: list[asyncio.Task[None]] = []
    writers: list[asyncio.StreamWriter] = []

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            loop.call_later(round_trip_s / 2, writer.write, data)
        loop.call_later(round_trip_s / 2, writer.close)

    async def accept(near_reader: asyncio.StreamReader, near_writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        writers.extend((near_writer, far_writer))
        for ends in ((near_reader, far_writer), (far_reader, near_writer)):
            tasks.append(asyncio.create_task(pass_on(*ends)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in writers:
            writer.transport.abort()
        await asyncio.sleep(0)


async def admits(router: SharedState, quotas: Quotas) -> bool:
    try:
        use(await router.reserve("t", quotas, RequestUse(10, 10, most_tokens=100, choices=1), weight=1.0), 10, 10)
    except RequestRefused:
        return False
    return True


@pytest.mark.parametrize(("round_trip_s", "patience_s"), [(0.05, 0.1), (0.3, 1.0)])
async def test_a_far_redis_counts_for_those_who_wait_and_is_never_taken_for_lost(
    redis: RedisServer, round_trip_s: float, patience_s: float
) -> None:
    async with far_from(redis.port, round_trip_s) as port:
        routers = []
        for name in "ab":
            flags = [
                f"--redis-url=redis://127.0.0.1:{port}/0", f"--key-prefix=far-{round_trip_s}", f"--router-id={name}",
                f"--redis-patience-ms={patience_s * 1e3:g}", "--workers=127.0.0.1:1",
            ]  # fmt: skip
            routers.append(share(router_settings(flags), FakeFleet(), Random(0)))
        await asyncio.gather(*(router.start() for router in routers))
        assert all(link_of(router).is_reachable for router in routers)
        running = [asyncio.create_task(router.run()) for router in routers]
        try:
            quotas = Quotas(requests_per_minute=2)
            assert [await admits(router, quotas) for router in (*routers, *routers)] == [True, True, False, False]
            syncs = [link_of(router).syncs for router in routers]
            await until(lambda: all(link_of(r).syncs > before + 1 for r, before in zip(routers, syncs, strict=True)))
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await asyncio.gather(*(router.close() for router in routers))
    assert [link_of(router).breaker.times_opened for router in routers] == [0, 0]
    assert [router.admission.reserves_alone for router in routers] == [0, 0]


async def test_a_far_redis_costs_no_more_than_the_patience_of_those_who_do_not_wait(redis: RedisServer) -> None:
    async with far_from(redis.port, 0.3) as port:
        router = SharedState(RedisStore(f"redis://127.0.0.1:{port}/0", "impatient"), "a", FakeFleet(), Random(0))
        await router.start()
        assert not link_of(router).is_reachable
        assert await admits(router, Quotas(requests_per_minute=2))
        assert router.admission.reserves_alone == 1
        await router.close()
