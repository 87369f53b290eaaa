"""Workers of one model that can do different things, such as those of the previous protocol beside those of this one:
each is sent only what it can do, for new requests, continued streams and grants alike."""

from typing import Any

import grpc
import pytest

from tests.router.asked_work import Ask
from tests.router.cluster import cluster, refusal, router_before, tokens_of, until
from tests.router.direct_rig import KEY, Call, Stream, arrival, direct
from tests.router.failover_rig import DIED, LONG, PROMPT, dies, first_of, kills_two, rest
from tests.router.fake_worker import FakeWorker
from trunkline.capabilities import Needs
from trunkline.protocol import OLDEST_PROTOCOL
from trunkline.status import CONTEXT_LENGTH_EXCEEDED, FORBIDDEN, INVALID_REQUEST, NO_WORKER, QUARANTINED
from trunkline.v1.fleet_pb2 import ExplainRouteRequest
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.inference_pb2 import GenerateRequest, TokenIds
from trunkline.v1.worker_pb2 import Adapter, Capability, Grammar, Task, Work
from trunkline_bench.servers.ports import free_port
from trunkline_router.request.failover import FailoverLimits

ADAPTERS = (Capability.CAPABILITY_ADAPTERS,)
WORK = Work(adapter=Adapter(id="legal", version="3"))


def worker(name: str, **settings: Any) -> FakeWorker:
    return FakeWorker(name, **{"answer": None, **settings})


def old(name: str = "old", **settings: Any) -> FakeWorker:
    """A worker of the previous protocol. It would answer any request, and ignore what it does not know."""
    return worker(name, protocol_version=OLDEST_PROTOCOL, min_router_protocol=OLDEST_PROTOCOL - 1, **settings)


def able(name: str, **settings: Any) -> FakeWorker:
    return worker(name, task=Task.TASK_GENERATE, capabilities=ADAPTERS, **settings)


async def test_new_requests_go_where_they_can_be_computed_and_plain_ones_anywhere(ask: Ask) -> None:
    workers = [old(answer=3), able("new", answer=3)]
    workers[0].cache_prompt(LONG)
    async with cluster(*workers) as router:
        await until(lambda: len(router.connected(0).blocks) > 0)
        assert (await router.answer(LONG))[0].prompt.worker_id == "old"
        ask(WORK)
        for _ in range(8):
            assert (await router.answer(LONG))[0].prompt.worker_id == "new"
    assert not any(submit.HasField("work") for submit in workers[0].submits)
    assert [submit.work for submit in workers[1].submits] == [WORK] * 8


async def test_a_stream_continues_on_workers_that_can_and_on_no_other(ask: Ask) -> None:
    workers = [old(), able("new-1"), able("new-2")]
    async with cluster(*workers) as router:
        ask(WORK)
        call = router.generate(PROMPT)
        begun = await first_of(workers[1:])
        begun.tokens(3)
        begun.fail(DIED)
        await dies(router, workers, begun.worker)
        resumed = await first_of([one for one in workers[1:] if one is not begun.worker])
        assert resumed.submit.work == WORK
        assert list(resumed.submit.resume.output_token_ids) == [0, 1, 2]
        resumed.tokens(2, finish=True)
        assert tokens_of(await rest(call)) == [0, 1, 2, 3, 4]
    assert not workers[0].submits


@pytest.mark.parametrize("tokens", [0, 3])
async def test_a_request_that_lost_the_only_able_worker_waits_for_its_return(tokens: int, ask: Ask) -> None:
    workers = [old(), able("new")]
    async with cluster(*workers) as router:
        ask(WORK)
        call = router.generate(PROMPT)
        begun = await workers[1].arrived.get()
        begun.tokens(tokens)
        begun.fail(DIED)
        await dies(router, workers, workers[1])
        await until(lambda: router.inference.pools.num_waiting == 1)
        await workers[1].start()
        resumed = await workers[1].arrived.get()
        assert len(resumed.submit.resume.output_token_ids) == tokens
        resumed.tokens(2, finish=True)
        assert tokens_of(await rest(call)) == list(range(tokens + 2))
    assert not workers[0].submits


async def test_a_stream_that_waits_in_vain_ends_and_is_not_taken_over_by_an_older_worker(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = [old(), able("new")]
    async with cluster(*workers, failover=FailoverLimits(patience_s=0.1)) as router:
        search = router.inference.pools.search
        searched: list[Needs] = []
        look_for = search.look_for

        async def noted(name: str, tenant: str, time_left_s: float | None, needs: Needs) -> None:
            searched.append(needs)
            await look_for(name, tenant, time_left_s, needs)

        monkeypatch.setattr(search, "look_for", noted)
        ask(WORK)
        call = router.generate(PROMPT)
        begun = await workers[1].arrived.get()
        begun.tokens(3)
        begun.fail(DIED)
        await dies(router, workers, workers[1])
        assert (await refusal(call)).reason == NO_WORKER
        assert (await refusal(router.generate(PROMPT))).reason == NO_WORKER
        assert searched == [frozenset(ADAPTERS)] * 2, "by the stream, and for the new request"
    assert not workers[0].submits


async def test_what_no_worker_can_do_is_refused_by_name_and_the_rest_is_served(ask: Ask) -> None:
    workers = [old(answer=3), worker("new", answer=3, capabilities=[Capability.CAPABILITY_GRAMMARS, 99])]
    async with cluster(*workers) as router:
        assert tokens_of(await router.answer(PROMPT)) == [0, 1, 2]
        ask(WORK)
        refused = await refusal(router.generate(PROMPT))
        assert (refused.code, refused.reason, refused.field) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            INVALID_REQUEST,
            "adapter",
        )
        assert refused.message == "adapter: needs the capability adapters, which no worker of model tiny has"
    assert not any(submit.HasField("work") for one in workers for submit in one.submits)


async def test_only_what_is_missing_is_named(ask: Ask) -> None:
    async with cluster(old(), worker("b", capabilities=[Capability.CAPABILITY_GRAMMARS])) as router:
        ask(Work(adapter=Adapter(id="a"), grammar=Grammar(digest=b"d")))
        refused = await refusal(router.generate(PROMPT))
        assert (refused.field, "grammars" in refused.message) == ("adapter", False)


async def test_capabilities_that_no_single_worker_has_together_are_all_named(ask: Ask) -> None:
    async with cluster(able("a"), worker("b", capabilities=[Capability.CAPABILITY_GRAMMARS])) as router:
        ask(Work(adapter=Adapter(id="a"), grammar=Grammar(digest=b"d")))
        assert "grammars, adapters" in (await refusal(router.generate(PROMPT))).message


async def test_a_worker_that_was_never_there_is_not_waited_for_and_is_used_once_it_comes(ask: Ask) -> None:
    workers = [old(answer=3), able("new", answer=3, port=free_port())]
    await workers[0].start()
    async with router_before(*workers, expected=(True, False)) as router:
        ask(WORK)
        assert (await refusal(router.generate(PROMPT))).reason == INVALID_REQUEST
        await workers[1].start()
        await router.until_workers(True, True)
        assert (await router.answer(PROMPT))[0].prompt.worker_id == "new"
    for one in workers:
        await one.die()
    assert not workers[0].submits


async def test_while_the_able_worker_is_away_a_retry_makes_sense(ask: Ask) -> None:
    workers = [old(answer=3), able("new")]
    async with cluster(*workers) as router:
        ask(WORK)
        workers[1].send_load(draining=True)
        await until(lambda: not router.connected(1).accepts)
        refused = await refusal(router.generate(PROMPT))
        assert (refused.reason, bool(refused.retry_s)) == (NO_WORKER, True)
        await workers[1].die()
        await router.until_workers(True, False)
        assert (await refusal(router.generate(PROMPT))).reason == NO_WORKER
    assert not workers[0].submits


async def test_the_limits_of_a_request_are_those_of_workers_that_can_compute_it(ask: Ask) -> None:
    async with cluster(old(answer=3, context_length=4096), able("new", context_length=64)) as router:
        long = list(range(10, 20)) * 10
        assert tokens_of(await router.answer(long)) == [0, 1, 2]
        ask(WORK)
        assert (await refusal(router.generate(long))).reason == CONTEXT_LENGTH_EXCEEDED
        sampling = SamplingParams(max_tokens=60)
        assert (await refusal(router.generate(PROMPT, sampling=sampling))).reason == CONTEXT_LENGTH_EXCEEDED


async def test_a_route_is_explained_among_able_workers(ask: Ask) -> None:
    async with cluster(old(), able("new")) as router:
        asked = ExplainRouteRequest(request=GenerateRequest(token_ids=TokenIds(ids=PROMPT)))
        assert len((await router.fleet.ExplainRoute(asked)).candidates) == 2
        ask(WORK)
        assert [one.worker_id for one in (await router.fleet.ExplainRoute(asked)).candidates] == ["new"]


async def test_blocks_count_for_the_version_of_the_adapter_that_computed_them(ask: Ask) -> None:
    workers = {name: able(name) for name in ("base", "this version", "earlier version")}
    workers["base"].cache_prompt(LONG)
    workers["this version"].cache_prompt(LONG, adapter=WORK.adapter)
    workers["earlier version"].cache_prompt(LONG, adapter=Adapter(id="legal", version="2"))
    async with cluster(*workers.values()) as router:
        await until(lambda: all(router.connected(place).blocks for place in range(3)))
        asked = ExplainRouteRequest(request=GenerateRequest(token_ids=TokenIds(ids=LONG)))
        for holder in ("base", "this version"):
            explained = await router.fleet.ExplainRoute(asked)
            assert [one.worker_id for one in explained.candidates if one.matched_tokens] == [holder]
            ask(WORK)


async def test_grants_are_for_able_workers_at_first_and_after_a_loss(ask: Ask) -> None:
    workers = [old(grant_key=KEY), able("new-1", grant_key=KEY), able("new-2", grant_key=KEY)]
    async with cluster(*workers, grant_key=KEY) as router, direct(router) as client:
        ask(WORK)
        stream = Stream(client)
        begun = await arrival(workers[1:])
        assert begun.submit.work == WORK
        begun.tokens(3)
        await stream.came(3)
        begun.fail(DIED)
        resumed = await arrival([one for one in workers[1:] if one is not begun.worker])
        assert resumed.submit.work == WORK
        resumed.tokens(2, finish=True)
        await stream.task
        assert stream.tokens() == [0, 1, 2, 3, 4]
    assert not workers[0].submits


async def test_no_grant_is_given_if_only_workers_without_the_key_can_compute_the_request(ask: Ask) -> None:
    workers = [worker("keyed", grant_key=KEY), able("able")]
    async with cluster(*workers, grant_key=KEY) as router:
        ask(WORK)
        call = Call(router)
        refused = await call.refused(call.first)
        assert (refused.reason, refused.message[:35]) == (FORBIDDEN, "no worker of model tiny takes this ")
    assert not workers[0].submits


async def test_a_prompt_that_kills_workers_with_an_adapter_is_refused_with_it_alone(ask: Ask) -> None:
    workers = [able(name) for name in "abc"]
    async with cluster(*workers) as router:
        plain = router.generate(PROMPT)
        (await first_of(workers)).tokens(3, finish=True)
        assert tokens_of(await rest(plain)) == [0, 1, 2]
        ask(WORK)
        call = router.generate(PROMPT)
        (left,) = await kills_two(router, workers, call)
        assert (await refusal(call)).reason == QUARANTINED
        assert (await refusal(router.generate(PROMPT))).reason == QUARANTINED
        ask(Work())
        plain = router.generate(PROMPT)
        (await first_of([left])).tokens(3, finish=True)
        assert tokens_of(await rest(plain)) == [0, 1, 2]


@pytest.mark.parametrize(("task", "name"), [(Task.TASK_EMBED, "embed"), (Task.TASK_SCORE, "score"), (9, "9")])
async def test_a_model_for_another_task_is_asked_for_no_text(task: "Task.ValueType", name: str) -> None:
    embedder = worker("e", task=task)
    async with cluster(embedder) as router:
        refused = await refusal(router.generate(PROMPT))
        assert (refused.reason, refused.field) == (INVALID_REQUEST, "model")
        assert refused.message.endswith(f"its task is {name}")
    assert not embedder.submits


async def test_workers_of_one_model_with_another_task_are_set_aside() -> None:
    workers = [worker("a", answer=3), old(answer=3), worker("embedder", task=Task.TASK_EMBED)]
    async with cluster(*workers) as router:
        await until(lambda: bool(router.inference.pools.models()) and bool(router.connected(2).aside))
        assert router.connected(2).aside == (
            "set aside: its task is embed, not generate as at 2 of the model's 3 workers"
        )
        for _ in range(4):
            assert (await router.answer(PROMPT))[0].prompt.worker_id != "embedder"
