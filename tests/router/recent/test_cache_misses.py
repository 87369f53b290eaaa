"""Why a request found little of its prompt in a cache, over real gRPC: what its line, its span and its counts say."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import structlog

from tests.router.api.observed import Traces
from tests.router.cluster import Cluster, cluster
from tests.router.fake_worker import FakeWorker
from tests.router.metrics.records import values
from tests.router.watch.watch_rig import ACME, BLIND, KeyRing, watched_router
from tests.runtime.otlp_receiver import GENERATE
from trunkline.v1.fleet_pb2 import GetRequestRequest, GetRequestResponse, RequestSummary
from trunkline.v1.inference_pb2 import ChatMessage, ChatMessages, GenerateRequest, TokenIds

SYSTEM = "You are a careful assistant, and today is Monday, the 1st of March. " * 2


async def summary(router: Cluster, request_id: str) -> RequestSummary:
    told: GetRequestResponse = await router.fleet.GetRequest(GetRequestRequest(request_id=request_id))
    return told.summary


async def turn(router: Cluster, system: str, said: Sequence[str], request_id: str = "") -> RequestSummary:
    """A turn of a conversation, in which user and assistant take turns."""
    roles = ["system", *(["user", "assistant"] * len(said))[: len(said)]]
    messages = [ChatMessage(role=role, content=text) for role, text in zip(roles, [system, *said], strict=True)]
    request = GenerateRequest(chat=ChatMessages(messages=messages), request_id=request_id or f"turn-{len(said)}")
    _ = [response async for response in router.stub.Generate(request)]
    return await summary(router, request.request_id)


async def test_a_conversation_whose_system_prompt_changes_is_told_from_which_token_on() -> None:
    said = ["Hello, read the file.", "It is read.", "And now change it, please.", "It is changed.", "Thank you."]
    async with cluster(FakeWorker("a")) as router:
        first = await turn(router, SYSTEM, said[:1])
        assert (first.cache_miss, first.seen_tokens) == ("new", 0)
        second = await turn(router, SYSTEM, said[:3])
        assert (second.cache_miss, second.seen_tokens) == ("", 0)
        third = await turn(router, SYSTEM.replace("Monday", "Sunday"), said)
        assert third.cache_miss == "changed"
        assert third.seen_tokens == third.cached_tokens
        assert 0 < third.seen_tokens < len(SYSTEM) / 2
        counted = values(router.counted.families, "trunkline_router_cache_misses_total", "model_name", "reason")
        assert counted == {("tiny", "new"): 1, ("tiny", "changed"): 1}


async def test_a_turn_that_continues_after_its_worker_died_is_told_so_in_its_line_and_its_span() -> None:
    a, b = FakeWorker("a"), FakeWorker("b")
    traces, prompt = Traces(), list(range(10, 74))
    async with cluster(a, b, observer=traces.observer) as router:
        await router.answer(prompt)
        holder = a if a.submits else b
        await holder.die()
        await router.until_workers(holder is b, holder is a)
        with structlog.testing.capture_logs() as lines:
            await router.answer([*prompt, 1, 2, 3])
    (line,) = (line for line in lines if line["event"] == "request ended")
    assert (line["cache_miss"], line["seen_tokens"]) == ("lost", 64)
    span = traces.named(GENERATE)[1]
    assert (span.attributes["trunkline.cache_miss"], span.attributes["trunkline.seen_tokens"]) == ("lost", 64)


async def test_only_a_prompt_that_was_computed_can_be_missed() -> None:
    worker = FakeWorker("a", answer=None)
    async with cluster(worker) as router:
        call = router.generate(list(range(64)))
        await worker.arrived.get()
        call.cancel()
        answer = asyncio.create_task(router.answer(list(range(64)), request_id="again"))
        (await worker.arrived.get()).tokens(1, finish=True)
        await answer
        assert (await summary(router, "again")).cache_miss == "new"


async def test_who_may_not_see_the_cache_is_not_told_why_it_was_missed(tmp_path: Path) -> None:
    keys = KeyRing(tmp_path)
    async with watched_router(keys, FakeWorker("a")) as router:
        await router.generate(keys.headers(ACME), token_ids=TokenIds(ids=range(64)), request_id="own")
        misses = []
        for who in (ACME, BLIND):
            metadata = tuple(keys.headers(who).items())
            told = await router.fleet.GetRequest(GetRequestRequest(request_id="own"), metadata=metadata)
            misses.append(told.summary.cache_miss)
        assert misses == ["new", ""]
