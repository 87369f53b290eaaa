"""Routers that share a real Redis: quotas of the whole fleet under load, and every way in which Redis can be lost."""

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import grpc
import pytest
import pytest_asyncio
from redis.asyncio import Redis

from tests.cluster.processes import Process, script
from tests.parameters import one_in
from tests.router.cluster import PATIENCE_S, Cluster, Refusal, refusal, router_before, until
from tests.router.fake_worker import FakeWorker
from tests.router.shared_state_rig import keys_in, link_of
from trunkline.status import CODE_INTERNAL, INTERNAL, RequestRefused
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.inference_pb2 import GenerateRequest, ListModelsRequest, TokenIds
from trunkline.v1.inference_pb2_grpc import InferenceServiceStub
from trunkline_bench.servers.ports import free_port
from trunkline_bench.servers.redis_server import RedisServer
from trunkline_router.access.access import Tenant, Tenants
from trunkline_router.main import router_settings
from trunkline_router.quotas.fleet import PoolFleet
from trunkline_router.quotas.quota import Quotas
from trunkline_router.quotas.redis_connection import CONNECT_TIMEOUT_S
from trunkline_router.quotas.redis_store import RedisStore
from trunkline_router.quotas.shared_state import SharedState
from trunkline_router.routing.credit import NO_CREDIT, Credit
from trunkline_router.workers.pool import Pools
from trunkline_runtime.channel import open_channel

PROMPT = list(range(10, 30))
ANSWER = 5  # tokens of each request
MOST = 15  # that it asks for
WINDOW_MS = 1200  # for a minute
ACME = (("x-trunkline-tenant", "acme"),)
UNLIMITED = Tenants()
REQUESTS_WITHOUT = 150  # through each router, while Redis is lost


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@asynccontextmanager
async def two_routers(
    redis: RedisServer, tenants: Tenants, *workers: FakeWorker, window_ms: int = WINDOW_MS, patience_s: float = 0.005
) -> AsyncIterator[tuple[Cluster, Cluster]]:
    def share(pools: Pools, rng: Random) -> SharedState:
        store = RedisStore(redis.url, "trunkline:", window_ms=window_ms, patience_s=patience_s)
        return SharedState(store, "router", PoolFleet(pools), rng, window_ms=window_ms, patience_s=patience_s)

    async with AsyncExitStack() as stack:
        for worker in workers:
            await worker.start()
            stack.push_async_callback(worker.die)
        made = [
            await stack.enter_async_context(router_before(*workers, tenants=tenants, share=share, seed=seed))
            for seed in range(2)
        ]
        yield made[0], made[1]


def generate(stub: Any, max_tokens: int = MOST, metadata: Any = ACME) -> Any:
    request = GenerateRequest(token_ids=TokenIds(ids=PROMPT), sampling=SamplingParams(max_tokens=max_tokens))
    return stub.Generate(request, metadata=metadata, timeout=PATIENCE_S)


async def ended(call: Any) -> int | str:
    """Tokens that the request used, or why it was refused."""
    try:
        usage = None
        while (response := await call.read()) is not grpc.aio.EOF:
            usage = response.usage
        return int(usage.prompt_tokens + usage.completion_tokens) if usage is not None else "no answer"
    except grpc.aio.AioRpcError as error:
        return Refusal(error).reason


async def load(
    routers: tuple[Cluster, Cluster], seconds: float, users: int = 8
) -> tuple[list[tuple[float, int]], set[str]]:
    """As many requests as they get through, in a closed loop: when each was answered and its tokens; and refusals."""
    answered: list[tuple[float, int]] = []
    refused: set[str] = set()
    end_s = time.monotonic() + seconds

    async def user(number: int) -> None:
        while time.monotonic() < end_s:
            outcome = await ended(generate(routers[number % 2].stub))
            if isinstance(outcome, str):
                refused.add(outcome)
                await asyncio.sleep(0.005)  # a client that comes back too soon, but leaves the machine to others
            else:
                answered.append((time.monotonic(), outcome))

    await asyncio.gather(*(user(number) for number in range(users)))
    return answered, refused


@pytest.mark.parametrize(
    ("quotas", "cost"),
    [
        pytest.param(Quotas(requests_per_minute=100), 1, id="requests"),
        pytest.param(Quotas(tokens_per_minute=100 * (len(PROMPT) + ANSWER)), 0, id="tokens"),
    ],
)
@pytest.mark.slow
async def test_quotas_hold_within_two_percent_over_two_routers_under_load(
    redis: RedisServer, quotas: Quotas, cost: int
) -> None:
    """Three windows, each for a minute, and long enough for a busy machine to use all that it may: 28 requests a
    second. Every request reserves 35 tokens and uses 25."""
    window_ms = 3 * WINDOW_MS
    limit = quotas.requests_per_minute or quotas.tokens_per_minute or 0
    tenants = Tenants({"acme": Tenant(quotas=quotas)})
    workers = FakeWorker("a", answer=ANSWER), FakeWorker("b", answer=ANSWER)
    # The test is of the store's count. On a busy machine a short patience ends, and a router counts alone.
    async with two_routers(redis, tenants, *workers, window_ms=window_ms, patience_s=PATIENCE_S) as routers:
        answered, refused = await load(routers, 3 * window_ms / 1e3)
        assert not any(router.shared.admission.reserves_alone for router in routers)
    assert refused == {"QUOTA_EXCEEDED"}
    used = sum(cost or tokens for _, tokens in answered)
    windows = (answered[-1][0] - answered[0][0]) * 1e3 / window_ms
    assert used <= 1.02 * limit * (int(windows) + 1), "nobody had more than the quota"
    assert used >= 0.98 * limit * 3, "and what the quota allows was had"


async def requests_during(
    routers: tuple[Cluster, Cluster], fault: Callable[[], Awaitable[None]]
) -> tuple[list[float], set[str]]:
    """Requests through both routers, one after another, while something happens: their times, and refusals."""
    times: list[float] = []
    refused: set[str] = set()
    over = asyncio.Event()

    async def user(router: Cluster) -> None:
        while not over.is_set():
            began_s = time.perf_counter()
            outcome = await ended(generate(router.stub))
            times.append(time.perf_counter() - began_s)
            if isinstance(outcome, str):
                refused.add(outcome)

    users = [asyncio.create_task(user(router)) for router in routers]
    try:
        await fault()
    finally:
        over.set()
        await asyncio.gather(*users)
    return times, refused


@pytest.mark.parametrize("way", one_in(3, ["hung", "killed", "restarted empty"]))
async def test_no_request_fails_when_redis_is(redis: RedisServer, way: str) -> None:
    tenants = Tenants({"acme": Tenant(quotas=Quotas(requests_per_minute=10**6, tokens_in_flight=10**6))})
    workers = FakeWorker("a", answer=ANSWER), FakeWorker("b", answer=ANSWER)
    async with two_routers(redis, tenants, *workers, window_ms=60_000) as routers:

        def all_reach(wanted: bool) -> Callable[[], bool]:
            return lambda: all(link_of(router.shared).is_reachable == wanted for router in routers)

        async def fault() -> None:
            await until(lambda: all(router.shared.admission.reserves > 20 for router in routers))
            if way == "hung":
                redis.hang()
            else:
                redis.kill()
            await until(all_reach(False))
            alone = [router.shared.admission.reserves_alone for router in routers]
            await until(
                lambda: all(
                    router.shared.admission.reserves_alone > so_far + REQUESTS_WITHOUT
                    for router, so_far in zip(routers, alone, strict=True)
                )
            )
            if way == "killed":
                return
            if way == "hung":
                redis.go_on()
            else:
                redis.start()
            await until(all_reach(True))
            asked = routers[0].shared.admission.reserves
            await until(lambda: routers[0].shared.admission.reserves > asked + 20)

        times, refused = await requests_during(routers, fault)
        assert not refused
        # The machine may stall some requests. Redis's own time-outs would meet each one that asks it.
        assert len(times) > 2 * REQUESTS_WITHOUT
        assert median(times) < CONNECT_TIMEOUT_S / 2, "requests do not wait for Redis's own time-outs"
        if way == "restarted empty":
            assert [link_of(router.shared).entries for router in routers] == [2, 2]
            answered = sum(len(worker.submits) for worker in workers)
            await until(lambda: all(not router.shared._own.book.has_changes for router in routers))
            counted = await window_of(redis, "acme")
            assert answered <= counted[0] <= answered * 1.02 + 4, "what was admitted before and meanwhile counts again"


async def window_of(redis: RedisServer, tenant: str) -> tuple[int, int]:
    async with Redis.from_url(redis.url, decode_responses=True) as client:
        requests, tokens = await client.hmget(f"{await keys_in(client)}window:{tenant}", "r", "t")
        return int(requests or 0), int(tokens or 0)


async def test_a_client_is_told_which_quota_is_used_up_and_when_to_come_back(redis: RedisServer) -> None:
    tenants = Tenants({"acme": Tenant(quotas=Quotas(requests_per_minute=1))})
    async with two_routers(redis, tenants, FakeWorker("a"), window_ms=60_000, patience_s=1.0) as (a, b):
        assert isinstance(await ended(generate(a.stub)), int)
        refused = await refusal(generate(b.stub))
    assert (refused.code, refused.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED")
    assert refused.quota == "acme/requests_per_minute"
    assert refused.retry_s is not None
    assert 55 < refused.retry_s <= 61


async def test_every_way_a_request_can_end_settles_it(redis: RedisServer) -> None:
    tenants = Tenants({"acme": Tenant(quotas=Quotas(tokens_per_minute=10**6, tokens_in_flight=10**6))})
    worker = FakeWorker("a", answer=None)
    async with two_routers(redis, tenants, worker, window_ms=60_000, patience_s=1.0) as (a, b):
        answered = generate(a.stub)
        (await worker.arrived.get()).tokens(4, finish=True)
        assert await ended(answered) == len(PROMPT) + 4
        gone = generate(b.stub)
        (await worker.arrived.get()).tokens(3)
        await gone.read()
        gone.cancel()
        before_output = generate(a.stub)
        await worker.arrived.get()
        before_output.cancel()
        refused = generate(b.stub)
        (await worker.arrived.get()).fail(RequestRefused(CODE_INTERNAL, INTERNAL, "no block is free"))
        assert await ended(refused) == INTERNAL
        broken = generate(b.stub)
        choice = await worker.arrived.get()
        choice.tokens(2)
        await broken.read()
        choice.fail(RequestRefused(CODE_INTERNAL, INTERNAL, "block 7 is held twice"))
        assert await ended(broken) == INTERNAL
        routers = a, b
        states = [router.shared._own for router in routers]
        await until(lambda: not any(state.running or state.book.has_changes for state in states))
        for router in routers:
            syncs = link_of(router.shared).syncs
            await until(partial(lambda router, syncs: link_of(router.shared).syncs > syncs + 1, router, syncs))
        assert await window_of(redis, "acme") == (4, 4 * len(PROMPT) + 4 + 3 + 2), "all but the refused one"


async def test_what_one_router_has_sent_counts_at_the_other(redis: RedisServer) -> None:
    worker = FakeWorker("a", answer=None)
    async with two_routers(redis, UNLIMITED, worker) as (a, b):
        call = generate(a.stub, metadata=())
        choice = await worker.arrived.get()
        await until(lambda: b.connected(0).foreign == Credit(1, len(PROMPT)))
        assert a.connected(0).foreign == NO_CREDIT
        choice.tokens(1, finish=True)
        assert await ended(call) == len(PROMPT) + 1
        await until(lambda: b.connected(0).foreign == NO_CREDIT)


async def test_invented_names_do_not_fill_redis_nor_come_to_more_than_so_many_quotas(redis: RedisServer) -> None:
    quotas = Quotas(requests_per_minute=2)
    tenants = Tenants({"acme": Tenant(quotas=quotas)}, Tenant(quotas=quotas))
    async with two_routers(redis, tenants, FakeWorker("a", answer=1), window_ms=60_000, patience_s=1.0) as (router, _):
        router.shared._own.book._max_accounts = 3

        async def outcomes(name: str, times: int) -> list[int | str]:
            metadata = (("x-trunkline-tenant", name),)
            return [await ended(generate(router.stub, metadata=metadata)) for _ in range(times)]

        served, refused = len(PROMPT) + 1, "QUOTA_EXCEEDED"
        for name in ("a", "b", "c"):
            assert await outcomes(name, 3) == [served, served, refused]
        assert [(await outcomes(f"invented-{number}", 1))[0] for number in range(6)] == [served] * 2 + [refused] * 4
        assert await outcomes("acme", 3) == [served, served, refused], "who is listed is not concerned"
        async with Redis.from_url(redis.url, decode_responses=True) as client:
            keys = [key async for key in client.scan_iter(match="*:window:*")]
    assert sorted(key.rpartition(":")[2] for key in keys) == ["*", "a", "acme", "b", "c"]


# Real router processes

# It is the fleet's count that is tried with them: on a busy machine 5 ms are soon over, and a router counts alone.
PATIENT = ("--redis-patience-ms=1000",)


@contextlib.contextmanager
def router_process(redis_url: str, tenants: Path, worker: str, port: int) -> Iterator[Process]:
    process = Process(
        script("trunkline-router"), f"--workers={worker}", f"--port={port}", f"--tenants={tenants}",
        f"--redis-url={redis_url}", *PATIENT,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.stop()


@dataclass(frozen=True)
class RouterPair:
    """Two router processes that share a Redis. Each is told of a worker of its own."""

    redis: RedisServer
    workers: Sequence[FakeWorker]
    processes: Sequence[Process]
    stubs: Sequence[Any]


@contextlib.asynccontextmanager
async def running_pair(folder: Path) -> AsyncIterator[RouterPair]:
    tenants = folder / "tenants.json"
    tenants.write_text(
        json.dumps({"acme": {"requests_per_minute": 60}, "held": {"tokens_in_flight": len(PROMPT) + MOST}})
    )
    async with AsyncExitStack() as stack:
        workers = [await FakeWorker(name, answer=ANSWER).start() for name in "ab"]
        for worker in workers:
            stack.push_async_callback(worker.die)
        redis = stack.enter_context(RedisServer(password="hunter2secret"))
        ports = [free_port() for _ in workers]
        processes = [
            stack.enter_context(router_process(redis.url, tenants, worker.address, port=port))
            for worker, port in zip(workers, ports, strict=True)
        ]
        for process in processes:
            await asyncio.to_thread(process.wait_for, "router listening")
        channels = [await stack.enter_async_context(open_channel(f"127.0.0.1:{port}")) for port in ports]
        yield RouterPair(redis, workers, processes, [InferenceServiceStub(channel) for channel in channels])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RouterPair]:
    async with running_pair(tmp_path_factory.mktemp("pair")) as running:
        yield running


@pytest_asyncio.fixture
async def doomed_pair(tmp_path: Path) -> AsyncIterator[RouterPair]:
    """For a test that kills one of the routers."""
    async with running_pair(tmp_path) as running:
        yield running


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_a_router_learns_of_workers_from_the_others(pair: RouterPair) -> None:
    """Each is told of one worker, and both send to both."""
    for stub in pair.stubs:
        async with asyncio.timeout(PATIENCE_S):
            while await ready_workers(stub) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


@pytest.mark.asyncio(loop_scope="module")
async def test_what_one_router_writes_does_not_end_another(pair: RouterPair) -> None:
    async with Redis.from_url(pair.redis.url, decode_responses=True) as client:
        keys = await keys_in(client)
        await client.hset(f"{keys}routers", "b/1", f"{int(time.time() * 1e3) + 60_000}:7")
        await client.hset(f"{keys}credits", "b/1", "7|[[[1, 2, 3]], []]")
        for process, stub in zip(pair.processes, pair.stubs, strict=True):
            await asyncio.to_thread(process.wait_for, "an entry in the shared state cannot be read")
            assert await ended(generate(stub, metadata=())) == len(PROMPT) + ANSWER
            assert process.popen.poll() is None
        await client.hdel(f"{keys}routers", "b/1")
        await client.hdel(f"{keys}credits", "b/1")


async def test_two_router_processes_keep_one_quota_and_a_killed_one_gives_its_tokens_back(
    doomed_pair: RouterPair,
) -> None:
    pair = doomed_pair
    held = (("x-trunkline-tenant", "held"),)
    outcomes: list[int | str] = []

    async def user(stub: Any) -> None:
        outcomes.extend([await ended(generate(stub)) for _ in range(45)])

    await asyncio.gather(*(user(stub) for stub in pair.stubs))
    assert abs(outcomes.count(len(PROMPT) + ANSWER) - 60) <= 1
    assert outcomes.count("QUOTA_EXCEEDED") == 90 - outcomes.count(len(PROMPT) + ANSWER)
    for worker in pair.workers:
        worker.answer = None
    running = generate(pair.stubs[0], metadata=held)
    arrivals = [asyncio.create_task(worker.arrived.get()) for worker in pair.workers]
    _, others = await asyncio.wait(arrivals, return_when=asyncio.FIRST_COMPLETED)
    for arrival in others:
        arrival.cancel()
    assert (await refusal(generate(pair.stubs[1], metadata=held))).quota == "held/tokens_in_flight"
    pair.processes[0].popen.kill()
    assert await ended(running) == ""
    for worker in pair.workers:
        worker.answer = ANSWER
    async with asyncio.timeout(PATIENCE_S):
        while await ended(generate(pair.stubs[1], metadata=held)) == "QUOTA_EXCEEDED":  # noqa: ASYNC110  # until its lease ends
            await asyncio.sleep(0.05)
    said = "\n".join(line for process in pair.processes for line in process.lines)
    assert "hunter2secret" not in said


async def ready_workers(stub: Any) -> int:
    models = (await stub.ListModels(ListModelsRequest(), wait_for_ready=True)).models
    return sum(model.ready_workers for model in models)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--redis-url=http://u:hunter2secret@h",), "--redis-url is not the URL of a Redis"),
        (("--key-prefix={x}",), "--key-prefix='{x}' is not a prefix"),
        (("--quota-when-down=maybe",), "allowed: open, closed"),
    ],
)
def test_a_bad_setting_of_sharing_is_one_line(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        router_settings(["--workers=127.0.0.1:1", *arguments])
    told = capsys.readouterr().err
    assert caught.value.code == 2
    assert told.count("\n") == 1
    assert said in told
    assert not re.search("hunter2secret", told)
