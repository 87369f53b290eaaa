"""A stream outlives its worker: what happens to requests when workers are lost, hang, drain, or die of them."""

import asyncio
from typing import Any

import grpc
import pytest

from tests.router.cluster import Cluster, Refusal, cluster, refusal, tokens_of, until
from tests.router.failover_rig import DIED, LONG, PROMPT, dies, fakes, first_of, rest
from tests.router.fake_worker import WORKER_DRAINS, FakeChoice, FakeWorker
from trunkline.protocol import CLEARING_STEPS
from trunkline.status import (
    CODE_INTERNAL,
    CODE_RESOURCE_EXHAUSTED,
    INTERNAL,
    OVERLOADED,
    QUARANTINED,
    RequestRefused,
)
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.inference_pb2 import GenerateRequest, TokenIds
from trunkline_router.request.failover import MAX_WITHOUT_PROGRESS, FailoverLimits
from trunkline_router.workers.breaker import FAILURES_TO_OPEN
from trunkline_router.workers.health import LEAST_SHARE
from trunkline_router.workers.link_context import LinkLimits

FULL = RequestRefused(CODE_RESOURCE_EXHAUSTED, OVERLOADED, "full", retry_delay_ms=50)
RUN = 40  # tokens that one step can have: what a grammar forces


async def begun(router: Cluster, workers: list[FakeWorker], **fields: Any) -> tuple[Any, FakeChoice]:
    """A request and its first choice, at whichever worker."""
    before = [len(worker.submits) for worker in workers]
    call = router.generate(PROMPT, **fields)
    await until(lambda: [len(worker.submits) for worker in workers] != before)
    worker = next(w for w, count in zip(workers, before, strict=True) if len(w.submits) > count)
    return call, await worker.arrived.get()


async def test_a_stream_goes_on_at_another_worker_from_what_was_sent() -> None:
    workers = fakes("a", "b")
    async with cluster(*workers) as router:
        call, choice = await begun(router, workers, sampling=SamplingParams(max_tokens=9, prompt_logprobs=1))
        choice.tokens(3, text="späť")
        first = await call.read()
        await choice.worker.die()
        other = next(worker for worker in workers if worker is not choice.worker)
        resumed = await other.arrived.get()
        resumed.tokens(2, text="...", finish=True)
        responses = [first, *await rest(call)]
    assert tokens_of(responses) == [0, 1, 2, 3, 4], "none lost, none twice"
    assert [c.text_offset for response in responses for c in response.chunks] == [0, len("späť".encode())]
    submit = resumed.submit
    assert (list(submit.resume.output_token_ids), submit.resume.text_bytes_sent) == ([0, 1, 2], 6)
    assert submit.sampling.seed == choice.submit.sampling.seed
    assert submit.sampling.max_tokens == 9, "of the whole output, not of the rest"
    assert not submit.sampling.HasField("prompt_logprobs"), "they were told"
    assert responses[-1].usage.resumptions == 1
    assert responses[-1].usage.completion_tokens == 5


async def test_what_the_client_has_not_taken_yet_is_not_lost_with_the_worker() -> None:
    workers = fakes("a", "b")
    async with cluster(*workers) as router:
        call, choice = await begun(router, workers)
        for _ in range(20):
            choice.tokens(1)
        choice.fail(WORKER_DRAINS)
        resumed = await next(w for w in workers if w is not choice.worker).arrived.get()
        resumed.tokens(1, finish=True)
        assert tokens_of(await rest(call)) == list(range(21))


async def test_choices_that_have_ended_are_not_computed_again() -> None:
    workers = fakes("a", "b")
    async with cluster(*workers) as router:
        call, zero = await begun(router, workers, n=3)
        one, two = [await zero.worker.arrived.get() for _ in range(2)]
        zero.tokens(2, finish=True)
        one.tokens(4)
        zero.worker.end_sessions()
        other = next(w for w in workers if w is not zero.worker)
        again = {choice.submit.choice: choice for choice in [await other.arrived.get(), await other.arrived.get()]}
        assert sorted(again) == [1, 2]
        assert not again[2].submit.HasField("resume"), "it had said nothing"
        again[1].tokens(1, finish=True)
        again[2].tokens(3, finish=True)
        responses = await rest(call)
    assert [tokens_of(responses, index) for index in range(3)] == [[0, 1], [0, 1, 2, 3, 4], [0, 1, 2]]
    assert two.sent == 0


async def test_only_workers_with_equal_weights_go_on_with_an_answer_but_any_may_begin_one() -> None:
    workers = [*fakes("old-1", "old-2"), *fakes("new", fingerprint="weights-2")]
    async with cluster(*workers) as router:
        old = workers[0]
        old.cache_prompt(PROMPT)
        await until(lambda: len(router.connected(0).blocks) > 0)
        call, choice = await begun(router, workers)
        assert choice.worker is old
        choice.tokens(1)
        await call.read()
        await old.die()
        resumed = await workers[1].arrived.get()
        resumed.fail(WORKER_DRAINS)
        await until(lambda: workers[1].num_running == 0)
        assert not workers[2].submits, "its tokens might contradict what was sent"
        fresh = list(range(40, 60))
        workers[2].cache_prompt(fresh)
        await until(lambda: len(router.connected(2).blocks) > 0)
        workers[2].answer = 3
        assert (await router.answer(fresh))[0].prompt.worker_id == "new"
        call.cancel()


async def test_a_stream_waits_for_its_only_worker_to_come_back() -> None:
    worker = FakeWorker("a", answer=None)
    async with cluster(worker) as router:
        call, choice = await begun(router, [worker])
        choice.tokens(2)
        await call.read()
        await worker.die()
        worker.epoch = 2
        await worker.start()
        resumed = await worker.arrived.get()
        resumed.tokens(1, finish=True)
        assert tokens_of(await rest(call)) == [2]


async def test_the_wait_for_a_worker_is_bounded_and_ends_with_unavailable() -> None:
    worker = FakeWorker("a", answer=None)
    async with cluster(worker, failover=FailoverLimits(patience_s=0.05)) as router:
        call, choice = await begun(router, [worker])
        choice.tokens(2)
        await call.read()
        await worker.die()
        refused = await refusal(call)
    assert (refused.code, refused.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_WORKER")
    assert refused.retry_s is not None


async def test_the_wait_for_a_worker_keeps_the_deadline() -> None:
    worker = FakeWorker("a", answer=None)
    async with cluster(worker) as router:
        call, choice = await begun(router, [worker], timeout_s=3.0)
        choice.tokens(2)
        await call.read()
        await worker.die()
        refused = await refusal(call)
    assert refused.code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_tries_without_progress_are_bounded_and_progress_earns_new_ones() -> None:
    workers = fakes(*"abcdefghijkl")
    async with cluster(*workers, failover=FailoverLimits(max_resumptions=8)) as router:
        call = router.generate(PROMPT)
        for attempt in range(3):  # each with a token
            choice = await next_choice(workers, attempt)
            choice.tokens(1)
            choice.fail(DIED)
        for attempt in range(3, 3 + MAX_WITHOUT_PROGRESS - 1):
            (await next_choice(workers, attempt)).fail(DIED)
        refused = await refusal(call)
        assert sum(len(worker.submits) for worker in workers) == 3 + MAX_WITHOUT_PROGRESS - 1
    assert refused.reason == "NO_WORKER"


async def next_choice(workers: list[FakeWorker], attempt: int) -> FakeChoice:
    await until(lambda: sum(len(worker.submits) for worker in workers) == attempt + 1)
    return await next(worker for worker in workers if not worker.arrived.empty()).arrived.get()


async def test_a_worker_that_hangs_loses_its_requests_and_gets_new_ones_when_it_is_back() -> None:
    workers = fakes("a", "b")
    async with cluster(*workers, link_limits=LinkLimits(inter_token_timeout_s=0.2)) as router:
        call, choice = await begun(router, workers)
        choice.tokens(2)
        hung, other = choice.worker, next(w for w in workers if w is not choice.worker)
        resumed = await other.arrived.get()
        assert list(resumed.submit.resume.output_token_ids) == [0, 1]
        await until(lambda: len(hung.aborted) == 1)
        link = router.links[workers.index(hung)]
        assert link.worker is not None
        assert not link.worker.accepts
        resumed.tokens(1, finish=True)
        assert tokens_of(await rest(call)) == [0, 1, 2]
        hung.send_load(running=0)
        await until(lambda: link.worker is not None and link.worker.accepts)
        assert link.worker.slow_start_share < 1


async def test_a_worker_starts_slowly_from_its_first_moment_on() -> None:
    workers = fakes("a", "b")
    async with cluster(*workers, link_limits=LinkLimits(slow_start_s=3600.0)) as router:
        shares = [router.connected(place).slow_start_share for place in range(2)]
        assert shares == pytest.approx([LEAST_SHARE, LEAST_SHARE], abs=0.01)


async def test_an_idle_worker_that_says_nothing_does_not_hang_and_a_busy_one_that_only_refuses_does() -> None:
    workers = fakes("busy", "idle")
    async with cluster(*workers, link_limits=LinkLimits(inter_token_timeout_s=0.2)) as router:
        call, choice = await begun(router, workers)
        hung = choice.worker
        other = next(worker for worker in workers if worker is not hung)
        hung.cache_prompt(LONG)
        await until(lambda: len(router.connected(workers.index(hung)).blocks) > 0)
        other.answer = 1
        while router.connected(workers.index(hung)).accepts:  # its front goes on to refuse what comes
            refused = router.generate(LONG)
            try:
                async with asyncio.timeout(0.1):
                    (await hung.arrived.get()).fail(FULL)
            except TimeoutError:
                pass
            await rest(refused)
        await rest(call)
        assert router.connected(workers.index(other)).accepts


async def test_a_worker_that_was_hung_and_is_back_may_have_its_requests_again() -> None:
    worker = FakeWorker("only", answer=None)
    async with cluster(worker, link_limits=LinkLimits(inter_token_timeout_s=0.2)) as router:
        call, choice = await begun(router, [worker])
        choice.tokens(2)
        await until(lambda: not router.connected(0).accepts)
        worker.send_load(running=0)
        resumed = await worker.arrived.get()
        resumed.tokens(1, finish=True)
        assert tokens_of(await rest(call)) == [0, 1, 2]


async def test_a_stream_does_not_wait_beside_a_worker_that_was_full_before() -> None:
    workers = fakes("a", "b")
    async with cluster(*workers) as router:
        call, choice = await begun(router, workers)
        choice.fail(FULL)
        second = await next(worker for worker in workers if worker is not choice.worker).arrived.get()
        second.tokens(2)
        await call.read()
        await asyncio.sleep(FULL.retry_delay_ms / 1e3)  # by now it has room, as it said
        second.fail(WORKER_DRAINS)
        resumed = await choice.worker.arrived.get()
        resumed.tokens(1, finish=True)
        assert tokens_of(await rest(call)) == [2]


async def test_copies_of_a_convicted_request_that_wait_are_not_sent_any_more() -> None:
    workers = fakes("a", "b", "c", "d")
    async with cluster(*workers) as router:
        workers[0].cache_prompt(LONG)
        await until(lambda: len(router.connected(0).blocks) > 0)
        calls = [router.generate(LONG) for _ in range(5)]
        for choice in [await workers[0].arrived.get() for _ in calls]:
            choice.fail(DIED, suspect=True)
        await dies(router, workers, workers[0])
        killer, *others = [await worker.arrived.get() for worker in workers[1:]]
        # As a front does whose engine has died.
        killer.worker.send_load(draining=True)
        await until(lambda: not router.connected(1).accepts)
        killer.fail(DIED, suspect=True, sole_suspect=True)
        await dies(router, workers, killer.worker)
        await until(lambda: router.inference.dispatcher.quarantine._convictions.has_new)
        for choice in others:
            choice.tokens(1, finish=True)
        ends = [await end_of(call) for call in calls]
        assert sorted(ends) == [QUARANTINED] * 3 + ["answered"] * 2
        assert sum(len(worker.submits) for worker in workers[1:]) == 3, "those that were out already"


async def end_of(call: Any) -> str:
    try:
        return "answered" if [response async for response in call] else ""
    except grpc.aio.AioRpcError as error:
        return Refusal(error).reason


async def suspects(router: Cluster, workers: list[FakeWorker], *names: str) -> dict[str, Any]:
    """Requests with these ids and equal prompts that were in a step when worker 0 died."""
    workers[0].cache_prompt(LONG)
    await until(lambda: len(router.connected(0).blocks) > 0)
    calls = {name: router.generate([*LONG, ord(name)], request_id=name) for name in names}
    choices = [await workers[0].arrived.get() for _ in names]
    for choice in choices:
        choice.tokens(1)
    for name in names:
        await calls[name].read()
    for choice in choices:
        choice.fail(DIED, suspect=True)
    await dies(router, workers, workers[0])
    return calls


async def test_suspects_go_on_each_at_a_worker_of_its_own() -> None:
    workers = fakes("a", "b", "c")
    async with cluster(*workers) as router:
        calls = await suspects(router, workers, "x", "y", "z")
        alone = [await workers[1].arrived.get(), await workers[2].arrived.get()]
        assert all(choice.submit.suspect for choice in alone)
        assert workers[1].arrived.empty()
        assert workers[2].arrived.empty(), "the third one waits"
        for _ in range(CLEARING_STEPS - 2):
            alone[0].tokens(1)
        alone[0].tokens(RUN)
        call, survived = calls[alone[0].submit.request_id], 0
        while survived < CLEARING_STEPS - 2 + RUN:
            survived += len(tokens_of([await call.read()]))
        assert alone[0].worker.arrived.empty(), "many tokens of one step are one step"
        alone[0].tokens(1)
        third = await alone[0].worker.arrived.get()
        assert {choice.submit.request_id for choice in [*alone, third]} == {"x", "y", "z"}
        for choice in (*alone, third):
            choice.tokens(1, finish=True)
        totals = [(await rest(call))[-1].usage.completion_tokens for call in calls.values()]
    assert sorted(totals) == [2, 2, 1 + CLEARING_STEPS + RUN]


async def test_a_request_that_kills_a_second_worker_alone_is_quarantined_and_its_company_goes_on() -> None:
    workers = fakes("a", "b", "c")
    async with cluster(*workers) as router:
        calls = await suspects(router, workers, "p", "q")
        poison, innocent = await workers[1].arrived.get(), await workers[2].arrived.get()
        if poison.submit.request_id != "p":
            poison, innocent = innocent, poison
        poison.worker.send_load(draining=True)
        poison.fail(DIED, suspect=True, sole_suspect=True)
        await dies(router, workers, poison.worker)
        refused = await refusal(calls["p"])
        assert (refused.code, refused.reason) == (grpc.StatusCode.FAILED_PRECONDITION, QUARANTINED)
        innocent.tokens(1, finish=True)
        assert (await rest(calls["q"]))[-1].usage.completion_tokens == 2
        seen = sum(len(worker.submits) for worker in workers)
        again = await refusal(router.generate([*LONG, ord("p")], sampling=SamplingParams(seed=5, max_tokens=6)))
        assert again.reason == QUARANTINED
        assert sum(len(worker.submits) for worker in workers) == seen, "no worker sees it again"
        request = GenerateRequest(token_ids=TokenIds(ids=[*LONG, ord("p")]))
        call = router.stub.Generate(request, metadata=(("x-trunkline-tenant", "other"),))
        choice = await next_choice(workers, seen)
        choice.tokens(1, finish=True)
        assert (await rest(call))[-1].usage.completion_tokens == 1, "another tenant is not judged by it"


async def test_a_suspect_that_did_not_die_alone_is_not_convicted() -> None:
    workers = fakes("a", "b", "c")
    async with cluster(*workers) as router:
        calls = await suspects(router, workers, "x")
        second = await first_of(workers[1:])
        second.fail(DIED, suspect=True, sole_suspect=False)
        third = await first_of([worker for worker in workers[1:] if worker is not second.worker])
        third.tokens(1, finish=True)
        assert (await rest(calls["x"]))[-1].usage.completion_tokens == 2


async def test_a_worker_where_requests_keep_failing_is_left_alone() -> None:
    bad, good = fakes("bad", "good")
    good.answer = 3
    async with cluster(bad, good) as router:
        bad.cache_prompt(PROMPT)
        await until(lambda: len(router.connected(0).blocks) > 0)
        for _ in range(FAILURES_TO_OPEN):
            call = router.generate(PROMPT)
            (await bad.arrived.get()).fail(RequestRefused(CODE_INTERNAL, INTERNAL, "block 7 is held twice"))
            await refusal(call)
        assert not router.connected(0).breaker.is_closed
        answer = await router.answer(PROMPT)
    assert answer[0].prompt.worker_id == "good", "although the other one holds the prefix"


async def test_a_breaker_does_not_take_the_last_worker_away() -> None:
    worker = FakeWorker("a", answer=None)
    async with cluster(worker) as router:
        for _ in range(FAILURES_TO_OPEN):
            call = router.generate(PROMPT)
            (await worker.arrived.get()).fail(RequestRefused(CODE_INTERNAL, INTERNAL, "block 7 is held twice"))
            await refusal(call)
        worker.answer = 3
        assert tokens_of(await router.answer(PROMPT)) == [0, 1, 2]


@pytest.mark.parametrize("lost", ["a", "b"])
async def test_an_answer_of_the_first_try_carries_the_worker_that_gave_it(lost: str) -> None:
    workers = {worker.worker_id: worker for worker in fakes("a", "b")}
    async with cluster(*workers.values()) as router:
        workers[lost].cache_prompt(PROMPT)
        await until(lambda: any(len(link.worker.blocks) > 0 for link in router.links if link.worker))
        call, choice = await begun(router, list(workers.values()))
        assert choice.worker.worker_id == lost
        choice.fail(WORKER_DRAINS)
        other = next(worker for name, worker in workers.items() if name != lost)
        (await other.arrived.get()).tokens(2, finish=True)
        responses = await rest(call)
    assert responses[0].prompt.worker_id == other.worker_id
    assert responses[-1].usage.resumptions == 0, "nothing had been said"


async def test_the_siblings_of_a_choice_that_broke_off_are_not_computed_for_nobody() -> None:
    worker = FakeWorker("a", answer=None)
    async with cluster(worker) as router:
        call, zero = await begun(router, [worker], n=2)
        (await worker.arrived.get()).fail(WORKER_DRAINS)
        await until(lambda: worker.num_running == 0)
        assert worker.aborted == [zero.submit]
        await until(lambda: router.connected(0).open_choices == 0)
        call.cancel()
