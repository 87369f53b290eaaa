"""Workers come and go while the router runs: by a list, by a name that is looked up, by several at once."""

import asyncio
from random import Random
from typing import Any

import pytest

from tests.router.cluster import until
from tests.router.fake_worker import FakeWorker
from tests.router.membership import Names, connected, membership, serving
from tests.router.router_process import SERVING, router_process, until_health
from tests.router.shared_state_rig import Clock
from trunkline.v1 import fleet_pb2
from trunkline.v1.fleet_pb2 import ListWorkersRequest, WorkerStatus
from trunkline.v1.fleet_pb2_grpc import FleetServiceStub
from trunkline.v1.inference_pb2 import GenerateRequest, TokenIds
from trunkline_bench.servers.ports import free_port
from trunkline_bench.servers.redis_server import RedisServer
from trunkline_router.prompts.helper_pool import Helpers
from trunkline_router.quotas.fleet import PoolFleet
from trunkline_router.quotas.redis_store import RedisStore
from trunkline_router.quotas.shared_state import SharedState
from trunkline_router.settings import address_problem
from trunkline_router.workers.discovery import (
    LOOKUP_EVERY_S,
    Addresses,
    fixed,
    resolve_name,
    sources_of,
)
from trunkline_router.workers.pool import Pools
from trunkline_runtime.channel import open_channel


async def test_workers_that_a_name_gains_are_connected_and_those_it_loses_go_when_their_connection_ends(
    helpers: Helpers,
) -> None:
    a, b = await FakeWorker("a").start(), await FakeWorker("b").start()
    names = Names()
    async with membership(helpers, names.watch()) as pools:
        await names.say(frozenset({a.address}))
        await until(lambda: connected(pools) == {a.address})
        await names.say(frozenset({a.address, b.address}))
        await until(lambda: connected(pools) == {a.address, b.address})
        await names.say(frozenset({b.address}))
        assert connected(pools) == {a.address, b.address}, "it may have streams to finish"
        await a.die()
        await until(lambda: [link.address for link in pools.links] == [b.address])
        await b.die()
        await until(lambda: pools.links[0].worker is None)
        assert len(pools.links) == 1, "what is still named is tried again"
        await b.start()
        await until(lambda: connected(pools) == {b.address})
    await b.die()


async def test_a_stream_finishes_on_a_worker_that_is_no_longer_named_while_new_requests_find_the_new_one(
    helpers: Helpers,
) -> None:
    old, new = await FakeWorker("old", answer=None).start(), await FakeWorker("new").start()
    names = Names()
    async with membership(helpers, names.watch()) as pools, serving(pools) as stub:
        await names.say(frozenset({old.address}))
        await until(lambda: connected(pools) == {old.address})
        stream = stub.Generate(GenerateRequest(token_ids=TokenIds(ids=range(10, 30))))
        choice = await old.arrived.get()
        choice.tokens(2)
        await stream.read()
        await names.say(frozenset({new.address}))
        await until(lambda: connected(pools) == {old.address, new.address})
        old.send_load(draining=True)
        await until(lambda: [worker.model.worker_id for worker in pools.models()["tiny"].workers] == ["new"])
        answers = [answer async for answer in stub.Generate(GenerateRequest(token_ids=TokenIds(ids=range(10, 30))))]
        assert answers[0].prompt.worker_id == "new"
        choice.tokens(3, finish=True)
        assert (await stream.read()).usage.completion_tokens == 5
        await old.die()
        await until(lambda: [link.address for link in pools.links] == [new.address])
    await new.die()


async def test_a_worker_with_two_names_is_one_worker_and_is_reached_by_the_other_where_one_breaks(
    helpers: Helpers,
) -> None:
    worker = await FakeWorker("w").start()
    by_name = f"localhost:{worker.port}"
    names = Names()
    async with membership(helpers, names.watch()) as pools:
        await names.say(frozenset({worker.address}))
        await until(lambda: connected(pools) == {worker.address})
        await names.say(frozenset({worker.address, by_name}))
        await until(lambda: [link.problem for link in pools.links] == ["", f"the same worker as {worker.address}"])
        assert [len(pool.workers) for pool in pools.models().values()] == [1]
        fleet = PoolFleet(pools)
        assert [lease.address for lease in fleet.leases()] == [worker.address, by_name], "it goes by both"
        await names.say(frozenset({by_name}))
        assert [lease.address for lease in fleet.leases()] == [by_name], "and so it does where only that one is named"
        await worker.die()
        await until(lambda: not connected(pools))
        await worker.start()
        await until(lambda: connected(pools) == {by_name})
        assert [link.address for link in pools.links] == [by_name]
    await worker.die()


async def test_a_lease_ends_with_the_name_that_it_was_taken_for_although_the_worker_lives(
    helpers: Helpers,
) -> None:
    worker = await FakeWorker("w").start()
    names, clock = Names(), Clock()
    first, second = Pools(Random(0)), Pools(Random(0))
    fleets = PoolFleet(first), PoolFleet(second)
    with RedisServer() as redis:
        shared = [
            SharedState(
                RedisStore(redis.url, "t", clock_ms=clock.now_ms), name, fleet, Random(0), steady_s=clock.steady_s
            )
            for name, fleet in zip("ab", fleets, strict=True)
        ]

        async def beat() -> None:
            for one in shared:
                assert one._sync is not None
                await one._sync.beat()

        for one in shared:
            await one.start()
        async with (
            membership(helpers, names.watch(), leases=fleets[0].leased(), pools=first),
            membership(helpers, leases=fleets[1].leased(), pools=second),
        ):
            await names.say(frozenset({worker.address}))
            await until(lambda: connected(first) == {worker.address})
            await beat()
            await until(lambda: connected(second) == {worker.address})
            for _ in range(5):
                clock.pass_s(1.0)
                await beat()
            assert first.links[0].wanted
            assert second.links[0].wanted, "the other router's lease holds"
            await names.say(frozenset())
            assert first.links[0].wanted, "while the last lease lasts"
            for _ in range(5):
                clock.pass_s(1.0)
                await beat()
            await until(lambda: not first.links[0].wanted and not second.links[0].wanted)
        for one in shared:
            await one.close()
    await worker.die()


async def test_a_worker_that_is_named_again_before_its_connection_ended_stays(helpers: Helpers) -> None:
    worker, names = await FakeWorker("a").start(), Names()
    async with membership(helpers, names.watch()) as pools:
        await names.say(frozenset({worker.address}))
        await until(lambda: connected(pools) == {worker.address})
        link = pools.links[0]
        await names.say(frozenset())
        assert not link.wanted
        await names.say(frozenset({worker.address}))
        await worker.die()
        await until(lambda: link.worker is None)
        await worker.start()
        await until(lambda: connected(pools) == {worker.address})
        assert pools.links == [link]
    await worker.die()


async def test_a_worker_that_is_named_again_as_its_link_ends_gets_a_new_one(helpers: Helpers) -> None:
    worker, names = await FakeWorker("a").start(), Names()
    async with membership(helpers, names.watch()) as pools:
        await names.say(frozenset({worker.address}))
        await until(lambda: connected(pools) == {worker.address})
        await names.say(frozenset())
        await worker.die()
        await until(lambda: not pools.links)
        await worker.start()
        await names.say(frozenset({worker.address}))
        await until(lambda: connected(pools) == {worker.address})
    await worker.die()


async def test_several_sources_name_workers_together_and_each_only_once(helpers: Helpers) -> None:
    names, others = Names(), Names()
    async with membership(helpers, fixed(["127.0.0.1:1"]), names.watch(), others.watch()) as pools:
        await until(lambda: len(pools.links) == 1)
        await names.say(frozenset({"127.0.0.1:1", "127.0.0.1:2"}))
        await others.say(frozenset({"127.0.0.1:2", "127.0.0.1:3"}))
        assert [link.address for link in pools.links] == ["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"]
        await names.say(frozenset())
        assert all(link.wanted for link in pools.links), "the list and the other name still have them"
        await others.say(frozenset())
        await until(lambda: [link.address for link in pools.links] == ["127.0.0.1:1"])


async def test_a_failing_lookup_keeps_what_was_known_and_says_so_once(capsys: pytest.CaptureFixture[str]) -> None:
    names = Names()
    names.answer = OSError(-2, "Name or service not known")
    seen: list[Addresses] = []

    async def follow() -> None:
        async for addresses in names.watch():
            seen.append(addresses)

    following = asyncio.create_task(follow())
    await names.say(OSError(-2, "Name or service not known"))
    assert seen == []
    await names.say(frozenset({"10.0.0.1:50061"}))
    for _ in range(3):
        await names.say(OSError(-3, "Temporary failure in name resolution"))
    assert seen == [frozenset({"10.0.0.1:50061"})]
    await names.say(frozenset({"10.0.0.2:50061"}))
    assert seen[1:] == [frozenset({"10.0.0.2:50061"})]
    following.cancel()
    printed = "".join(capsys.readouterr())
    assert printed.count("Name or service not known") == 1
    assert printed.count("Temporary failure") == 1
    least_s, most_s = LOOKUP_EVERY_S
    assert all(least_s <= slept_s <= most_s for slept_s in names.slept_s)
    assert len(set(names.slept_s)) == len(names.slept_s), "with jitter"


@pytest.mark.parametrize(
    ("name", "found"),
    [("127.0.0.1", {"127.0.0.1:7"}), ("::1", {"[::1]:7"}), ("[::1]", {"[::1]:7"}), ("localhost", {"127.0.0.1:7"})],
)
async def test_names_resolve_to_addresses_of_one_family(name: str, found: set[str]) -> None:
    assert await resolve_name(name, 7) == found


async def test_a_list_may_mix_addresses_and_names() -> None:
    (listed, looked_up), lookups = sources_of(("a:1", "dns:127.0.0.1:2", "b:3"), Random(0))
    assert len(lookups) == 1
    assert await anext(listed) == {"a:1", "b:3"}
    assert await anext(looked_up) == {"127.0.0.1:2"}
    (only,), _ = sources_of(("dns:[::1]:2",), Random(0))
    assert await anext(only) == {"[::1]:2"}


@pytest.mark.parametrize("entry", ["dns:", "dns:name", "dns::1", "dns:name:0", "dns:name:x"])
def test_a_name_without_a_port_is_one_line(entry: str) -> None:
    problem = address_problem(("a:1", entry))
    assert problem is not None
    assert problem.startswith(f"--workers={entry} is not host:port or dns:name:port; allowed: ")


async def test_a_router_process_finds_its_workers_by_name() -> None:
    worker, port = await FakeWorker("a").start(), free_port()
    try:
        async with (
            router_process(port, f"dns:localhost:{worker.port}") as _,
            open_channel(f"127.0.0.1:{port}") as channel,
        ):
            await until_health(channel, "readiness", SERVING)
    finally:
        await worker.die()


async def test_a_router_process_has_a_worker_of_two_names_once() -> None:
    worker, port = await FakeWorker("a").start(), free_port()
    try:
        async with (
            router_process(port, worker.address, f"localhost:{worker.port}") as _,
            open_channel(f"127.0.0.1:{port}") as channel,
        ):
            await until_health(channel, "readiness", SERVING)
            stub: Any = FleetServiceStub(channel)
            async with asyncio.timeout(60):
                while not any("the same worker" in status.problem for status in await known(stub)):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            states = sorted(status.state for status in await known(stub))
            assert states == sorted([fleet_pb2.WORKER_STATE_READY, fleet_pb2.WORKER_STATE_CONNECTING])
    finally:
        await worker.die()


async def known(stub: Any) -> list[WorkerStatus]:
    """The workers that a router has heard of."""
    return list((await stub.ListWorkers(ListWorkersRequest())).workers)
