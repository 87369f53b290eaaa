"""What a request is charged, whichever way it ends: over real gRPC, before workers that do as they are told."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from tests.router.cluster import PATIENCE_S, Cluster, refusal, router_before, until
from tests.router.fake_worker import FakeWorker
from trunkline.status import (
    CODE_DEADLINE_EXCEEDED,
    CODE_RESOURCE_EXHAUSTED,
    DEADLINE_EXCEEDED,
    OVERLOADED,
    RequestRefused,
)
from trunkline.v1.fleet_pb2 import ExplainRouteRequest
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.inference_pb2 import (
    ChatMessage,
    ChatMessages,
    DetokenizeRequest,
    GenerateRequest,
    TokenIds,
    TokenizeRequest,
)
from trunkline_router.access.access import Tenant, Tenants
from trunkline_router.prompts.tokenizer import MAX_TEXT_BYTES
from trunkline_router.quotas.quota import Quotas
from trunkline_router.request.inference import MAX_DETOKENIZED_IDS

ACME = (("x-trunkline-tenant", "acme"),)
PROMPT = [5] * 1000
THREE = Tenants({"acme": Tenant(quotas=Quotas(requests_per_minute=3, tokens_per_minute=3 * (len(PROMPT) + 8)))})
FULL = RequestRefused(CODE_RESOURCE_EXHAUSTED, OVERLOADED, "full", retry_delay_ms=1000)
TOO_LATE = RequestRefused(CODE_DEADLINE_EXCEEDED, DEADLINE_EXCEEDED, "the deadline cannot be met")


@asynccontextmanager
async def router_with_quotas(worker: FakeWorker) -> AsyncIterator[Cluster]:
    await worker.start()
    try:
        async with router_before(worker, tenants=THREE) as router:
            yield router
    finally:
        await worker.die()


def generate(router: Cluster, max_tokens: int = 8, timeout_s: float = PATIENCE_S) -> Any:
    request = GenerateRequest(token_ids=TokenIds(ids=PROMPT), sampling=SamplingParams(max_tokens=max_tokens))
    return router.stub.Generate(request, timeout=timeout_s, metadata=ACME)


async def until_ended(router: Cluster) -> None:
    await until(lambda: not router.shared.running)


def charged(router: Cluster) -> tuple[int, int]:
    """Requests and tokens in the tenant's window."""
    window = router.shared._own.book.tenant("acme").window
    return window.requests, window.tokens


async def test_who_gives_up_before_the_first_token_pays_for_the_prompt() -> None:
    worker = FakeWorker("a", answer=None)
    async with router_with_quotas(worker) as router:
        for _ in range(3):
            call = generate(router)
            await worker.arrived.get()
            call.cancel()
            await until_ended(router)
        assert charged(router) == (3, 3 * len(PROMPT))
        assert (await refusal(generate(router))).quota == "acme/requests_per_minute"
    assert len(worker.submits) == 3


async def test_a_deadline_before_the_first_token_is_paid_for_too() -> None:
    worker = FakeWorker("a", answer=None)
    async with router_with_quotas(worker) as router:
        call = generate(router, timeout_s=3.0)
        await worker.arrived.get()
        assert (await refusal(call)).code == grpc.StatusCode.DEADLINE_EXCEEDED
        await until_ended(router)
        assert charged(router) == (1, len(PROMPT))


@pytest.mark.parametrize(("begun", "tokens"), [(False, 0), (True, len(PROMPT))])
async def test_what_a_worker_finds_to_be_too_late_costs_nothing_unless_it_had_begun(begun: bool, tokens: int) -> None:
    worker = FakeWorker("a", answer=None)
    async with router_with_quotas(worker) as router:
        call = generate(router)
        (await worker.arrived.get()).fail(TOO_LATE, begun=begun)
        assert (await refusal(call)).reason == DEADLINE_EXCEEDED
        await until_ended(router)
        assert charged(router) == (int(begun), tokens)


async def test_tokens_that_nobody_took_are_paid_for() -> None:
    worker = FakeWorker("a", answer=None)
    async with router_with_quotas(worker) as router:
        call = generate(router)
        choice = await worker.arrived.get()
        choice.tokens(2)
        assert len((await call.read()).chunks[0].token_ids) == 2
        choice.tokens(5)
        session = router.connected(0).session
        await until(lambda: session.num_step_outputs == 2)
        call.cancel()
        await until_ended(router)
        assert charged(router) == (1, len(PROMPT) + 7)


@pytest.mark.parametrize("way", ["no room", "lost", "given up after it was lost"])
async def test_what_every_worker_lost_or_refused_costs_nothing(way: str) -> None:
    worker = FakeWorker("a", answer=None)
    async with router_with_quotas(worker) as router:
        call = generate(router)
        choice = await worker.arrived.get()
        if way == "no room":
            choice.fail(FULL)
            assert (await refusal(call)).reason == OVERLOADED
        else:
            await worker.die()
            await router.until_workers(False)
            if way == "lost":
                for _ in range(2):  # it comes back, and dies of something else
                    await worker.start()
                    await worker.arrived.get()
                    await worker.die()
                    await router.until_workers(False)
            call.cancel()
        await until_ended(router)
        assert charged(router) == (0, 0)


async def test_an_answer_that_ended_costs_its_prompt_and_its_tokens() -> None:
    worker = FakeWorker("a", answer=5)
    async with router_with_quotas(worker) as router:
        async with asyncio.timeout(PATIENCE_S):
            responses = [response async for response in generate(router)]
        assert responses[-1].usage.completion_tokens == 5
        await until_ended(router)
        assert charged(router) == (1, len(PROMPT) + 5)


OTHER_CALLS: dict[str, Callable[[Cluster, tuple[tuple[str, str], ...]], Any]] = {
    "Tokenize": lambda router, metadata: router.stub.Tokenize(TokenizeRequest(text="a text"), metadata=metadata),
    "Detokenize": lambda router, metadata: router.stub.Detokenize(
        DetokenizeRequest(token_ids=[1, 2]), metadata=metadata
    ),
    "ExplainRoute": lambda router, metadata: router.fleet.ExplainRoute(
        ExplainRouteRequest(request=GenerateRequest(text="a text")), metadata=metadata
    ),
}


REFUSED_CALLS: dict[str, Callable[[Cluster, tuple[tuple[str, str], ...]], Any]] = {
    "Generate, too many choices": lambda router, metadata: router.stub.Generate(
        GenerateRequest(text="a text", n=10_000), metadata=metadata
    ),
    "Tokenize nothing": lambda router, metadata: router.stub.Tokenize(TokenizeRequest(), metadata=metadata),
    "Tokenize too long a text": lambda router, metadata: router.stub.Tokenize(
        TokenizeRequest(text="x" * (MAX_TEXT_BYTES + 1)), metadata=metadata
    ),
    "Tokenize a chat without messages": lambda router, metadata: router.stub.Tokenize(
        TokenizeRequest(chat=ChatMessages()), metadata=metadata
    ),
    "Detokenize an id out of range": lambda router, metadata: router.stub.Detokenize(
        DetokenizeRequest(token_ids=[1, 2**30]), metadata=metadata
    ),
    "Detokenize too many ids": lambda router, metadata: router.stub.Detokenize(
        DetokenizeRequest(token_ids=[1] * (MAX_DETOKENIZED_IDS + 1)), metadata=metadata
    ),
    "ExplainRoute, too many choices": lambda router, metadata: router.fleet.ExplainRoute(
        ExplainRouteRequest(request=GenerateRequest(text="a text", n=10_000)), metadata=metadata
    ),
    "ExplainRoute without a prompt": lambda router, metadata: router.fleet.ExplainRoute(
        ExplainRouteRequest(request=GenerateRequest()), metadata=metadata
    ),
}


@pytest.mark.parametrize("name", REFUSED_CALLS)
async def test_refused_calls_cost_nothing(name: str) -> None:
    async with router_with_quotas(FakeWorker("a")) as router:
        for _ in range(5):
            assert (await refusal(REFUSED_CALLS[name](router, ACME))).code == grpc.StatusCode.INVALID_ARGUMENT
        await until_ended(router)
        assert charged(router) == (0, 0)
        await OTHER_CALLS["Tokenize"](router, ACME)
        assert charged(router) == (1, 0)


async def test_a_chat_that_the_template_refuses_has_made_work_and_counts() -> None:
    chat = ChatMessages(messages=[ChatMessage(role="owl", content="hoo")])
    async with router_with_quotas(FakeWorker("a")) as router:
        for _ in range(2):
            call = router.stub.Tokenize(TokenizeRequest(chat=chat), metadata=ACME)
            assert (await refusal(call)).code == grpc.StatusCode.INVALID_ARGUMENT
        await until_ended(router)
        assert charged(router) == (2, 0)


@pytest.mark.parametrize("name", OTHER_CALLS)
async def test_calls_that_generate_nothing_count_as_requests_and_as_no_tokens(name: str) -> None:
    call = OTHER_CALLS[name]
    async with router_with_quotas(FakeWorker("a")) as router:
        for number in range(3):
            await call(router, ACME)
            assert charged(router) == (number + 1, 0)
        refused = await refusal(call(router, ACME))
        assert (refused.reason, refused.quota) == ("QUOTA_EXCEEDED", "acme/requests_per_minute")
        assert refused.retry_s
        assert (await refusal(generate(router))).quota == "acme/requests_per_minute"
        await call(router, ())  # another tenant's
        await until_ended(router)


@pytest.mark.parametrize("name", ["Generate, too many choices", "ExplainRoute, too many choices"])
async def test_quotas_are_checked_before_a_prompt_is_tokenized(name: str) -> None:
    async with router_with_quotas(FakeWorker("a")) as router:
        for _ in range(3):
            await OTHER_CALLS["Detokenize"](router, ACME)
        assert (await refusal(REFUSED_CALLS[name](router, ACME))).quota == "acme/requests_per_minute"


@pytest.mark.parametrize("name", OTHER_CALLS)
async def test_a_call_that_generates_nothing_hides_no_quota(name: str) -> None:
    async with router_with_quotas(FakeWorker("a")) as router:
        await OTHER_CALLS[name](router, ACME)
        assert [(tenant, quotas) for tenant, quotas, _ in router.shared.quota_use()] == [
            ("acme", THREE.named["acme"].quotas)
        ]


@pytest.mark.parametrize("name", OTHER_CALLS)
async def test_a_call_that_generates_nothing_is_not_refused_for_tokens(name: str) -> None:
    worker = FakeWorker("a", answer=None)
    async with router_with_quotas(worker) as router:
        call = generate(router, max_tokens=2 * len(PROMPT))
        await worker.arrived.get()
        assert (await refusal(generate(router))).quota == "acme/tokens_per_minute"
        await OTHER_CALLS[name](router, ACME)
        call.cancel()
        await until_ended(router)
