"""Clients that stream from real workers by grants: the answers are the router's to the bit, whatever happens.

See test_faults.py, whose streams and accidents these are.
"""

import asyncio
import dataclasses
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.cluster.harmed_fleet import FEWEST, INTER_TOKEN_TIMEOUT, KEY, LONG, SILENCE_S, STREAMS, HarmedFleet
from tests.worker.engine_rig import DEMO_MODEL
from trunkline.client.client import Client
from trunkline.errors import error_of
from trunkline.grant import sign_grant
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.worker_pb2 import (
    DrainRequest,
    GetModelRequest,
    GetStatsRequest,
    GrantReport,
    SessionHello,
    SessionRequest,
    Submit,
    UndrainRequest,
    WatchCacheRequest,
    WorkerServiceGenerateRequest,
)
from trunkline_bench.faults.fleet import Fleet, running_fleet, until
from trunkline_bench.faults.main import worker_flags
from trunkline_bench.faults.scenarios import ACCIDENTS, compare, struck, undisturbed
from trunkline_bench.faults.streams import Order, Record, Streams, orders

pytestmark = pytest.mark.asyncio(loop_scope="package")

# Workers for tests that call one of them alone. Two drain theirs: the next test that needs the whole fleet has both of
# them started again at the same time.
UNDRAINED, DRAINED_WITH_A_GRANT, DRAINED_BY_COMMAND = range(3)


@asynccontextmanager
async def direct_fleet() -> AsyncIterator[tuple[Fleet, Fleet]]:
    """A fleet, as clients of its router see it, and as direct ones do."""
    environment = {"TRUNKLINE_GRANT_KEY": KEY}
    async with AsyncExitStack() as stack:
        routed = await stack.enter_async_context(
            running_fleet(
                DEMO_MODEL,
                *worker_flags(deterministic=True),
                router_arguments=(INTER_TOKEN_TIMEOUT, f"--grant-key={KEY}"),
                environment=environment,
            )
        )
        client = Client(routed.addresses[0], direct=True, inter_token_timeout_s=SILENCE_S)
        await stack.enter_async_context(client)
        yield routed, dataclasses.replace(routed, clients=[client])


async def test_direct_answers_are_the_routers_to_the_bit(fleet: HarmedFleet) -> None:
    outcome = compare(await undisturbed(fleet.direct, fleet.wanted), fleet.expected, 0.0)
    assert outcome.is_clean, (outcome.errors, outcome.differing, outcome.seams)
    (router,) = fleet.routed.routers

    def told() -> bool:
        return any("outcome" in line and "granted" in line for line in router.lines)

    await until(told, "the router's log tells of them")
    assert KEY not in "".join(router.lines)


@pytest.mark.parametrize("accident", ["kill -9 of an engine", pytest.param("link reset", marks=pytest.mark.slow)])
async def test_no_token_of_a_direct_answer_is_lost_repeated_or_changed_by_an_accident(
    fleet: HarmedFleet, accident: str
) -> None:
    wanted, expected = fleet.longest(FEWEST)
    outcome = await struck(fleet.direct, wanted, expected, ACCIDENTS[accident])
    assert outcome.is_clean, (outcome.errors, outcome.differing, outcome.seams)
    assert outcome.resumed > 0, "no stream was hit"


async def test_no_direct_answer_that_has_begun_needs_its_router(fleet: HarmedFleet) -> None:
    wanted, expected = fleet.longest(FEWEST)
    outcome = compare(await router_killed(fleet.direct, wanted), expected, 0.0)
    assert outcome.is_clean, (outcome.errors, outcome.differing, outcome.seams)


async def router_killed(fleet: Fleet, wanted: Sequence[Order]) -> Sequence[Record]:
    """All streams; the only router is killed once each of them has begun."""
    all_begun = asyncio.Event()

    async def one(order: Order) -> Record:
        streams = Streams(lambda total: begun(order))
        (record,) = await streams.run(fleet.clients, [order])
        return record

    waiting = [id(order) for order in wanted]

    def begun(order: Order) -> None:
        if id(order) in waiting:
            waiting.remove(id(order))
        if not waiting:
            all_begun.set()

    running = asyncio.gather(*(one(order) for order in wanted))
    await all_begun.wait()
    fleet.routers[0].kill()
    records = await running
    await fleet.nothing_live()
    return records


@pytest.mark.slow
async def test_direct_answers_survive_any_accident() -> None:
    wanted = orders(STREAMS, tokens=LONG)
    async with direct_fleet() as (routed, direct):
        expected = await undisturbed(routed, wanted)
        for name, accident in ACCIDENTS.items():
            outcome = await struck(direct, wanted, expected, accident)
            assert outcome.is_clean, (name, outcome.errors, outcome.differing, outcome.seams)
            assert outcome.resumed > 0 or not name.startswith("kill"), f"{name}: no stream was hit"


@pytest.mark.slow
async def test_a_router_that_is_told_to_stop_is_gone_before_a_direct_answer_that_has_begun(fleet: HarmedFleet) -> None:
    (client,), (router,) = fleet.direct.clients, fleet.routed.routers
    pieces = client.generate([5, 6, 7], max_tokens=300, ignore_eos=True)
    tokens = list((await anext(aiter(pieces))).token_ids)
    os.kill(router.pid, signal.SIGTERM)  # though it would wait for streams of its own
    assert await router.ended() == 0

    def told() -> bool:  # the last lines may be read after the process has ended
        return any("request ended" in line and "granted" in line for line in router.lines)

    await until(told, "the router's log tells of the grant")
    async for piece in pieces:
        tokens += piece.token_ids
    assert len(tokens) == 300


DOOMED = """
import asyncio, sys
from trunkline import Client

async def main():
    async with Client(sys.argv[1], direct=True) as client:
        async for piece in client.generate([5, 6, 7], n=2, max_tokens=900, ignore_eos=True):
            print(piece.response.request_id, flush=True)

asyncio.run(main())
"""


async def test_a_client_that_is_killed_leaves_nothing_behind(fleet: HarmedFleet) -> None:
    (router,) = fleet.routed.routers
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", DOOMED, fleet.routed.addresses[0], stdout=asyncio.subprocess.PIPE
    )
    assert client.stdout is not None
    request_id = (await client.stdout.readline()).decode().strip()
    async with asyncio.timeout(60):
        while sum([(await worker.load()).running for worker in fleet.routed.workers]) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # the second choice may come later
    client.kill()
    await client.wait()
    await fleet.routed.nothing_live()

    def ended() -> list[str]:
        return [line for line in router.lines if "request ended" in line and request_id in line]

    await until(lambda: bool(ended()), "the router has heard of the client's end")


async def test_a_worker_tells_the_session_that_a_grant_names_what_became_of_it(standing_fleet: HarmedFleet) -> None:
    worker = standing_fleet.routed.workers[DRAINED_WITH_A_GRANT]
    model = await worker.stub.GetModel(GetModelRequest())
    session = worker.stub.Session(metadata=await worker.proof("Session"))
    await session.write(SessionRequest(hello=SessionHello(router_id="r")))
    number = (await session.read()).welcome.session

    def granted(handle: int, **fields: Any) -> Any:
        sampling = SamplingParams(seed=1, ignore_eos=True, **fields)
        prompt = [5, 6, 7]
        submit = Submit(handle=handle, report_session=number, prompt_token_ids=prompt, sampling=sampling)
        expires_ms = int(time.time() * 1e3) + 30_000
        grant = sign_grant(KEY.encode(), submit, epoch=model.epoch, expires_unix_ms=expires_ms)
        return worker.stub.Generate(WorkerServiceGenerateRequest(grant=grant))

    told: list[Any] = []

    async def report() -> tuple[int, GrantReport]:
        if not told:
            told.extend((await session.read()).outputs)
        output = told.pop(0)
        return output.handle, output.granted

    answered = granted(11, max_tokens=4)
    assert await report() == (11, GrantReport())
    async for _ in answered:
        pass
    assert await report() == (11, GrantReport(ended=True, prompt_tokens=3, output_tokens=4))

    left = granted(12, max_tokens=900)
    assert await report() == (12, GrantReport())
    await left.read()
    left.cancel()
    handle, ended = await report()
    assert (handle, ended.ended, ended.given_up, ended.prompt_tokens) == (12, True, False, 3)
    assert 0 < ended.output_tokens < 900

    refused = granted(13, max_tokens=0)
    with pytest.raises(grpc.aio.AioRpcError):
        await refused.read()
    assert await report() == (13, GrantReport(ended=True))

    cut_off = granted(14, max_tokens=900)
    assert await report() == (14, GrantReport())
    await cut_off.read()
    await worker.drain(0.0)
    handle, ended = await report()
    assert (handle, ended.ended, ended.given_up, ended.prompt_tokens) == (14, True, True, 3)
    turned_away = granted(15, max_tokens=900)
    with pytest.raises(grpc.aio.AioRpcError):
        await turned_away.read()
    assert await report() == (15, GrantReport(ended=True, given_up=True))
    session.cancel()


async def test_what_only_routers_and_operators_may_call_asks_for_a_proof_of_the_key(
    standing_fleet: HarmedFleet,
) -> None:
    worker = standing_fleet.routed.workers[DRAINED_BY_COMMAND]
    stub = worker.stub
    good = {method: await worker.proof(method) for method in ("Session", "WatchCache", "GetStats", "Drain", "Undrain")}
    calls: dict[str, Callable[[Any], Any]] = {
        "Session": lambda proof: stub.Session(
            metadata=proof
        ).read(),  # no write: one that crosses the refusal ends in INTERNAL
        "WatchCache": lambda proof: stub.WatchCache(WatchCacheRequest(), metadata=proof).read(),
        "GetStats": lambda proof: stub.GetStats(GetStatsRequest(), metadata=proof),
        "Drain": lambda proof: stub.Drain(DrainRequest(), metadata=proof),
        "Undrain": lambda proof: stub.Undrain(UndrainRequest(), metadata=proof),
    }
    for method, call in calls.items():
        for proof in ((), good["Drain" if method != "Drain" else "Session"]):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(proof)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED, method
    await until(lambda: "call refused" in "".join(worker.process.lines), "the worker says so")
    status, out, err = await drain_command(worker.worker_id, {})
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert "--grant-key" in err
    assert await drain_command(worker.worker_id, {"TRUNKLINE_GRANT_KEY": KEY}) == (0, "finished 0, cut off 0\n", "")


async def drain_command(address: str, environment: dict[str, str]) -> tuple[int | None, str, str]:
    """As in a pod."""
    process = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).with_name("trunkline")), "drain", f"--address={address}", env=os.environ | environment,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_a_worker_with_a_key_takes_grants_for_this_life_of_it_once_and_no_bare_requests(
    standing_fleet: HarmedFleet,
) -> None:
    worker = standing_fleet.routed.workers[UNDRAINED]
    model = await worker.stub.GetModel(GetModelRequest())
    assert model.grant_key_ids
    submit = Submit(prompt_token_ids=[5, 6, 7], sampling=SamplingParams(max_tokens=2, seed=1))
    now_ms = int(time.time() * 1e3)
    good, old, expired = (
        sign_grant(KEY.encode(), submit, epoch=epoch, expires_unix_ms=expires_ms)
        for epoch, expires_ms in (
            (model.epoch, now_ms + 30_000),
            (model.epoch ^ 1, now_ms + 30_000),
            (model.epoch, now_ms),
        )
    )
    forged = sign_grant(KEY[::-1].encode(), submit, epoch=model.epoch, expires_unix_ms=now_ms + 30_000)
    chunks = [item.chunk async for item in worker.stub.Generate(WorkerServiceGenerateRequest(grant=good))]
    assert sum(len(chunk.token_ids) for chunk in chunks) == 2
    for request in (
        WorkerServiceGenerateRequest(grant=good),
        WorkerServiceGenerateRequest(grant=old),
        WorkerServiceGenerateRequest(grant=expired),
        WorkerServiceGenerateRequest(grant=forged),
        WorkerServiceGenerateRequest(submit=submit),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker.stub.Generate(request).read()
        assert (caught.value.code(), error_of(caught.value).reason) == (
            grpc.StatusCode.PERMISSION_DENIED,
            "FORBIDDEN",
        )
    await standing_fleet.routed.nothing_live()
