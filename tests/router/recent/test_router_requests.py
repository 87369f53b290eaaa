"""Processes of one router find each other's requests, over real Unix sockets; routers are not asked by others."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from tests.router.cluster import PATIENCE_S, Cluster, cluster, refusal, until
from tests.router.fake_worker import FakeWorker
from tests.router.watch.watch_rig import ids, until_view, watch
from trunkline.status import RequestRefused
from trunkline.v1.fleet_pb2 import GetRequestRequest, ListRequestsRequest, RequestSummary
from trunkline_bench.servers.redis_server import RedisServer
from trunkline_router.access.access import Access
from trunkline_router.observe.recent import router_requests
from trunkline_router.observe.recent.router_requests import SUFFIX, Kind, RouterRequests, first_of
from trunkline_router.observe.recent.viewer import Viewer
from trunkline_router.quotas.fleet import PoolFleet
from trunkline_router.quotas.redis_store import RedisStore
from trunkline_router.quotas.shared_state import SharedState
from trunkline_router.workers.pool import Pools

OPERATOR = Viewer.of(Access().caller(()))
ACME = replace(OPERATOR, tenant="acme", is_operator=False)


def sockets_in(folder: Path) -> list[Path]:
    return list(folder.glob(f"*{SUFFIX}"))


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests in which every process answers, however slow the machine is."""
    monkeypatch.setattr(router_requests, "ANSWER_S", PATIENCE_S)


@asynccontextmanager
async def processes(folder: Path, count: int = 2) -> AsyncIterator[list[tuple[Cluster, RouterRequests]]]:
    """As many routers as a router may have processes."""
    async with AsyncExitStack() as stack:
        made, tasks = [], []
        for number in range(count):
            router = await stack.enter_async_context(cluster(FakeWorker("a")))
            of_one = router.watch.requests
            requests = RouterRequests(of_one.recent, of_one._running, directory=folder, number=number)
            tasks.append(asyncio.create_task(requests.run()))
            made.append((router, requests))
        await until(lambda: len(sockets_in(folder)) == count)
        yield made
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def listed(requests: RouterRequests, viewer: Viewer, most: int = 10) -> Sequence[RequestSummary]:
    return first_of(Kind.ENDED, await requests.list(viewer, (Kind.ENDED, Kind.RUNNING), most), most)


@pytest.mark.usefixtures("patience")
async def test_each_process_finds_and_lists_the_requests_of_all(tmp_path: Path) -> None:
    async with processes(tmp_path, 3) as made:
        for number, (router, _) in enumerate(made):
            await router.answer([1, 2, 3], request_id=f"of-{number}")
        for _, requests in made:
            assert ids(await listed(requests, OPERATOR)) == ["of-2", "of-1", "of-0"]
            assert ids(await listed(requests, OPERATOR, 2)) == ["of-2", "of-1"]
            for number in range(3):
                found = await requests.find(OPERATOR, f"of-{number}")
                assert found.summary.request_id == f"of-{number}"
                assert found.placements[0].candidates
            with pytest.raises(RequestRefused, match="no recent request"):
                await requests.find(OPERATOR, "of-none")


@pytest.mark.usefixtures("patience")
async def test_rights_count_in_every_process(tmp_path: Path) -> None:
    async with processes(tmp_path) as ((_, requests), (other, _)):
        await other.answer([1, 2, 3], request_id="of-third")
        assert ids(await listed(requests, OPERATOR)) == ["of-third"]
        blind = replace(OPERATOR, sees_cache=False)
        assert not (await requests.find(blind, "of-third")).placements
        for viewer in (ACME, replace(OPERATOR, sees_requests=False)):
            assert not await listed(requests, viewer)
            with pytest.raises(RequestRefused):
                await requests.find(viewer, "of-third")


async def test_a_process_that_is_dead_mute_or_mad_is_left_out(tmp_path: Path) -> None:
    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def half_an_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(bytes([10, 127]) + b"of 127 bytes")
        writer.close()

    async with processes(tmp_path) as ((own, requests), (other, _)):
        (tmp_path / f"dead{SUFFIX}").touch()
        server = await asyncio.start_unix_server(mute, tmp_path / f"mute{SUFFIX}")
        half = await asyncio.start_unix_server(half_an_answer, tmp_path / f"half{SUFFIX}")
        await own.answer([1, 2, 3], request_id="own")
        await other.answer([1, 2, 3], request_id="there")
        assert ids(await listed(requests, OPERATOR)) == ["there", "own"]
        assert (await requests.find(OPERATOR, "there")).summary.request_id == "there"
        for stopped in (server, half):
            stopped.close()
            await stopped.wait_closed()
        for name in ("dead", "mute", "half"):
            (tmp_path / f"{name}{SUFFIX}").unlink(missing_ok=True)
        for asked in (b"", b"{}\n", b"no\n", b"x" * (1 << 17)):
            reader, writer = await asyncio.open_unix_connection(tmp_path / f"1{SUFFIX}")
            writer.write(asked)
            writer.write_eof()
            assert await reader.read() == b""
            writer.close()
            await writer.wait_closed()
        assert (await requests.find(OPERATOR, "there")).summary.request_id == "there"


async def test_a_request_of_another_router_is_not_found_and_the_answer_says_where_to_look(
    redis_of_all: RedisServer,
) -> None:
    def sharing(name: str) -> Callable[[Pools, Random], SharedState]:
        def share(pools: Pools, rng: Random) -> SharedState:
            store = RedisStore(redis_of_all.url, "not-found:", patience_s=PATIENCE_S)
            return SharedState(store, name, PoolFleet(pools), rng, patience_s=PATIENCE_S)

        return share

    asked = GetRequestRequest(request_id="there")
    async with cluster(FakeWorker("w-1"), share=sharing("here")) as here:
        missing = await refusal(here.fleet.GetRequest(asked, timeout=PATIENCE_S))
        assert missing.message == "no recent request 'there' is known here"
        async with cluster(FakeWorker("w-2"), share=sharing("there")) as there:
            await until(lambda: len(here.shared.neighbours) == len(there.shared.neighbours) == 1)
            await there.answer([1, 2, 3], request_id="there")
            missing = await refusal(here.fleet.GetRequest(asked, timeout=PATIENCE_S))
            assert missing.reason == "REQUEST_NOT_FOUND"
            assert missing.message == (
                "no recent request 'there' is known here; other router processes (1) are alive and are not asked: the "
                "request's log line and trace name the router that served it"
            )
            assert not (await here.fleet.ListRequests(ListRequestsRequest(), timeout=PATIENCE_S)).requests
            await until_view(watch(here, {}), lambda view: view.router.other_routers == 1)
