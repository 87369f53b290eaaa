"""The direct path: the router chooses and signs, the client streams from the worker, and no request is worse off."""

import asyncio
from typing import Any

import pytest

from tests.router.cluster import cluster, refusal, router_before, until
from tests.router.direct_rig import KEY, PROMPT, Stream, arrival, choices, direct, fakes
from tests.router.failover_rig import DIED, dies
from tests.router.fake_worker import WORKER_DRAINS
from trunkline import Client
from trunkline.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NoWorker,
    Overloaded,
    Quarantined,
    TrunklineError,
)
from trunkline.status import CODE_INTERNAL, CODE_RESOURCE_EXHAUSTED, INTERNAL, OVERLOADED, RequestRefused
from trunkline.v1.generation_pb2 import Lane, SamplingParams
from trunkline_router.access.access import Access, Tenant, Tenants
from trunkline_router.request.failover import FailoverLimits


async def test_an_answer_streams_from_the_worker_and_reads_as_the_routers_would() -> None:
    (worker,) = fakes("a", answer=3)
    async with cluster(worker, grant_key=KEY) as router, direct(router) as client:
        answers = [await c.complete(PROMPT, seed=5) for c in (client, client)]
        assert not [message for message in worker.messages if message.submits], "the router sent nothing"
        async with Client(f"127.0.0.1:{router.port}") as routed:
            expected = await routed.complete(PROMPT, seed=5)
        assert len(worker.submits) == 3
    (first, second) = answers
    assert second.choices == expected.choices
    assert second.prompt == expected.prompt
    assert second.usage == expected.usage
    assert first.prompt.cached_tokens == 0
    assert second.prompt.cached_tokens > 0


async def test_what_the_worker_computes_is_what_the_router_made_of_the_request() -> None:
    (worker,) = fakes("a", answer=1, default_sampling=SamplingParams(top_k=7))
    tenants = Tenants({"acme": Tenant(weight=3.0, cap=Lane.LANE_BATCH)})
    async with cluster(worker, grant_key=KEY, tenants=tenants) as router, direct(router, tenant="acme") as client:
        await client.complete(PROMPT, lane="interactive", max_tokens=9, request_id="r-1", timeout_s=15.0)
    (submit,) = worker.submits
    assert (submit.tenant, submit.tenant_weight, submit.lane) == ("acme", 3.0, Lane.LANE_BATCH)
    assert (submit.sampling.max_tokens, submit.sampling.top_k, submit.request_id) == (9, 7, "r-1")
    assert submit.cache_salt == Access(tenants).caller((("x-trunkline-tenant", "acme"),)).cache_salt() != b""
    assert submit.sampling.HasField("seed")
    assert 0 < submit.timeout.ToSeconds() <= 15


@pytest.mark.parametrize(
    ("cap", "lane"), [(None, Lane.LANE_STANDARD), (Lane.LANE_INTERACTIVE,) * 2, (Lane.LANE_BATCH,) * 2]
)
async def test_a_grant_is_for_the_highest_lane_that_its_tenant_may_use(
    cap: "Lane.ValueType | None", lane: "Lane.ValueType"
) -> None:
    (worker,) = fakes("a", answer=1)
    tenants = None if cap is None else Tenants(otherwise=Tenant(cap=cap))
    async with cluster(worker, grant_key=KEY, tenants=tenants) as router, direct(router) as client:
        done = await client.complete(PROMPT, lane="interactive")
    assert [submit.lane for submit in worker.submits] == [done.prompt.lane] == [lane]


async def test_a_request_counts_at_its_worker_for_as_long_as_it_runs_there() -> None:
    workers = fakes("a")
    async with cluster(*workers, grant_key=KEY) as router, direct(router) as client:
        stream = Stream(client, n=2)
        zero, one = await choices(workers, 2)
        connected = router.connected(0)
        assert (connected.open_choices, connected.queued_tokens) == (2, len(PROMPT))
        one.tokens(1)
        zero.tokens(2)
        await until(lambda: connected.queued_tokens == 0)
        assert connected.open_choices == 2
        one.tokens(1, finish=True)
        zero.tokens(1, finish=True)
        await stream.task
        await until(lambda: connected.open_choices == 0)
    assert (stream.tokens(0), stream.tokens(1)) == ([0, 1, 2], [0, 1])
    assert stream.pieces[0].response.HasField("prompt"), "what is told of the prompt comes first"
    assert [piece.response.HasField("usage") for piece in stream.pieces].index(True) == len(stream.pieces) - 1
    assert stream.pieces[-1].response.usage.completion_tokens == 5


async def test_a_stream_goes_on_at_another_worker_from_what_has_come() -> None:
    workers = fakes("a", "b")
    async with cluster(*workers, grant_key=KEY) as router, direct(router) as client:
        stream = Stream(client, max_tokens=9, prompt_logprobs=1)
        choice = await arrival(workers)
        choice.tokens(3, text="späť")
        await stream.came(3)
        await choice.worker.die()
        resumed = await arrival(workers)
        resumed.tokens(2, text="...", finish=True)
        await stream.task
    assert resumed.worker is not choice.worker
    assert stream.tokens() == [0, 1, 2, 3, 4], "none lost, none twice"
    submit = resumed.submit
    assert (list(submit.resume.output_token_ids), submit.resume.text_bytes_sent) == ([0, 1, 2], 6)
    assert submit.sampling.seed == choice.submit.sampling.seed
    assert not submit.sampling.HasField("prompt_logprobs"), "they were told"
    usage = stream.pieces[-1].response.usage
    assert (usage.resumptions, usage.completion_tokens) == (1, 5)


async def test_choices_that_have_ended_are_not_computed_again() -> None:
    workers = fakes("a", "b")
    async with cluster(*workers, grant_key=KEY) as router, direct(router) as client:
        stream = Stream(client, n=3)
        at_first = await choices(workers, 3)
        at_first[0].tokens(2, finish=True)
        at_first[1].tokens(4)
        await stream.came(6)
        at_first[2].fail(WORKER_DRAINS)
        one, two = await choices(workers, 2)
        assert (one.submit.choice, two.submit.choice) == (1, 2)
        assert not two.submit.HasField("resume"), "it had said nothing"
        one.tokens(1, finish=True)
        two.tokens(3, finish=True)
        await stream.task
    assert [stream.tokens(index) for index in range(3)] == [[0, 1], [0, 1, 2, 3, 4], [0, 1, 2]]


async def test_a_full_worker_sends_the_client_to_another_one() -> None:
    workers = fakes("a", "b")
    async with cluster(*workers, grant_key=KEY) as router, direct(router) as client:
        stream = Stream(client)
        full = await arrival(workers)
        full.fail(RequestRefused(CODE_RESOURCE_EXHAUSTED, OVERLOADED, "full", retry_delay_ms=500))
        other = await arrival(workers)
        assert other.worker is not full.worker
        other.fail(RequestRefused(CODE_RESOURCE_EXHAUSTED, OVERLOADED, "full", retry_delay_ms=700))
        with pytest.raises(Overloaded) as caught:
            await stream.task
    assert caught.value.retry_after_s == 0.5, "the first one to have room"


async def test_a_worker_that_was_restarted_meanwhile_takes_no_old_grant_and_the_client_asks_for_another() -> None:
    workers = fakes("a", "b", answer=2)
    failover = FailoverLimits(patience_s=0.05)
    async with cluster(*workers, grant_key=KEY, failover=failover) as router, direct(router) as client:
        router.connected(0).model.epoch = router.connected(1).model.epoch = 99  # as both were before
        with pytest.raises(NoWorker):
            await client.complete(PROMPT)
        assert not workers[0].submits
        assert not workers[1].submits
        router.connected(1).model.epoch = workers[1].epoch
        assert (await client.complete(PROMPT)).prompt.worker_id == "b"


async def test_a_request_that_was_refused_for_itself_is_not_tried_again() -> None:
    workers = fakes("a", "b")
    async with cluster(*workers, grant_key=KEY) as router, direct(router) as client:
        stream = Stream(client)
        (await arrival(workers)).fail(RequestRefused(CODE_INTERNAL, INTERNAL, "a bug"))
        with pytest.raises(InternalError):
            await stream.task
        with pytest.raises(InvalidRequest) as caught:
            await client.complete(PROMPT, temperature=-1.0)
        assert caught.value.field == "sampling.temperature"
        assert sum(len(worker.submits) for worker in workers) == 1


async def test_a_client_that_leaves_ends_everything_at_once() -> None:
    workers = fakes("a")
    async with cluster(*workers, grant_key=KEY) as router:
        async with direct(router) as client:
            pieces: Any = client.generate(PROMPT, n=2)
            reading = asyncio.create_task(anext(pieces))
            zero, _ = await choices(workers, 2)
            zero.tokens(1)
            await reading
            assert router.connected(0).open_choices == 2
            await pieces.aclose()
            await until(lambda: len(workers[0].aborted) == 2 and router.connected(0).open_choices == 0)
        gone = direct(router)
        stream = Stream(gone)
        await arrival(workers)
        await gone.close()
        with pytest.raises(TrunklineError, match="closed"):
            await stream.task
        await until(lambda: len(workers[0].aborted) == 3 and router.connected(0).open_choices == 0)


async def test_a_deadline_holds_at_the_worker_and_at_the_router() -> None:
    workers = fakes("a")
    async with cluster(*workers, grant_key=KEY) as router, direct(router) as client:
        with pytest.raises(DeadlineExceeded):
            await client.complete(PROMPT, timeout_s=3.0)
        await until(lambda: len(workers[0].aborted) == 1 and router.connected(0).open_choices == 0)
        await workers[0].die()
        await router.until_workers(False)


async def test_an_answer_that_has_begun_survives_the_end_of_the_router() -> None:
    workers = fakes("a")
    for worker in workers:
        await worker.start()
    async with router_before(*workers, grant_key=KEY) as router:
        client = direct(router, inter_token_timeout_s=0.02)
        stream = Stream(client)
        choice = await arrival(workers)
        choice.tokens(1)
        await stream.came(1)
        await router.service.stop_admission()
    choice.tokens(2, finish=True)
    await stream.task
    assert stream.tokens() == [0, 1, 2]
    await client.close()
    await workers[0].die()


async def test_what_was_convicted_on_the_routed_path_is_not_granted() -> None:
    workers = fakes("a", "b", "c")
    async with cluster(*workers, grant_key=KEY) as router, direct(router) as client:
        call = router.generate(PROMPT, sampling=SamplingParams(max_tokens=9))
        for sole in (False, True):
            choice = await arrival(workers)
            choice.fail(DIED, suspect=True, sole_suspect=sole)
            await dies(router, workers, choice.worker)
        assert (await refusal(call)).reason == "QUARANTINED"
        with pytest.raises(Quarantined):
            await client.complete(PROMPT, max_tokens=9)


async def test_a_wait_for_a_worker_is_bounded() -> None:
    workers = fakes("a")
    failover = FailoverLimits(patience_s=0.05)
    async with cluster(*workers, grant_key=KEY, failover=failover) as router, direct(router) as client:
        stream = Stream(client)
        choice = await arrival(workers)
        choice.tokens(2)
        await stream.came(2)
        await workers[0].die()
        with pytest.raises(NoWorker):
            await stream.task
