"""A request that is refused before its prompt is tokenized is told when there will be room for a small one. One for
which that is not enough is told so then, and how long it must wait: clients give up after two or three tries."""

from random import Random
from typing import Any

import pytest

from tests.router.fake_worker import FakeWorker
from tests.router.openai.openai_rig import CHAT, OpenAiClient, client
from tests.router.shared_state_rig import Clock
from trunkline_router.access.access import Tenant, Tenants
from trunkline_router.quotas.admission import RequestUse
from trunkline_router.quotas.fleet import PoolFleet
from trunkline_router.quotas.quota import Quotas
from trunkline_router.quotas.shared_state import SharedState
from trunkline_router.workers.pool import Pools

QUOTAS = Quotas(tokens_per_minute=10_000)
FIRST, SECOND = 2000, 8000  # tokens of two requests that fill the quota
APART_S = 30.0  # between them
STEP_S = 1.0  # a window is exact to half a second
CONTEXT = 12_000

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# Those that do not fit into what the first request leaves free when it is a minute old.
LARGE: dict[str, tuple[str, dict[str, Any]]] = {
    "token ids": (COMPLETIONS, {"prompt": [5] * 4000, "max_tokens": 2}),
    "two prompts of token ids": (COMPLETIONS, {"prompt": [[5] * 4000] * 2, "max_tokens": 2}),
    "a text": (COMPLETIONS, {"prompt": "x" * 9000, "max_tokens": 2}),
    "max_tokens": (CHATS, {"messages": CHAT, "max_tokens": 4000}),
    "max_tokens of several choices": (CHATS, {"messages": CHAT, "max_tokens": 1000, "n": 3}),
    "an estimate for several choices": (CHATS, {"messages": CHAT, "n": 4}),
    "max_tokens of a message": ("/v1/messages", {"messages": CHAT, "max_tokens": 4000}),
    "max_tokens of a response": ("/v1/responses", {"input": "hi", "max_output_tokens": 4000}),
}
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "a text": (COMPLETIONS, {"prompt": "hi", "max_tokens": 2}),
    "the default of max_tokens": (COMPLETIONS, {"prompt": "hi"}),
    "an estimate": (CHATS, {"messages": CHAT}),
}


async def filled(shared: SharedState, clock: Clock) -> None:
    """Two requests, of which the first leaves the window when the second one is as old as they are apart."""
    for tokens in (FIRST, SECOND):
        reservation = await shared.reserve("", QUOTAS, RequestUse(tokens, 0, most_tokens=0, choices=1), weight=1.0)
        reservation.charge_in_full(0, 0)
        reservation.settle()
        if tokens == FIRST:
            clock.pass_s(APART_S)


async def delay_s(asks: OpenAiClient, path: str, body: dict[str, Any]) -> float:
    """What a refusal tells the client to wait."""
    refused = await asks.post(path, {"model": "tiny", **body})
    assert refused.status_code == 429, refused.text
    return int(refused.headers["retry-after-ms"]) / 1e3


@pytest.mark.parametrize(
    ("name", "requests", "waits"), [*((name, LARGE, 2) for name in LARGE), *((name, SMALL, 1) for name in SMALL)]
)
async def test_a_client_that_waits_as_told_is_admitted_the_second_time_at_the_latest(
    name: str, requests: dict[str, tuple[str, dict[str, Any]]], waits: int
) -> None:
    clock = Clock()

    def share(pools: Pools, rng: Random) -> SharedState:
        return SharedState(None, "router", PoolFleet(pools), rng, steady_s=clock.steady_s)

    path, body = requests[name]
    tenants = Tenants(otherwise=Tenant(quotas=QUOTAS))
    worker = FakeWorker("w", context_length=CONTEXT, kv_token_capacity=CONTEXT)
    async with client(worker, share=share, tenants=tenants) as asks:
        await filled(asks.router.shared, clock)
        for _ in range(waits):
            told_s = await delay_s(asks, path, body)
            assert APART_S - STEP_S < told_s < APART_S + STEP_S
            clock.pass_s(told_s)
        answer = await asks.post(path, {"model": "tiny", **body})
        assert answer.status_code == 200, answer.text


async def test_a_request_that_is_too_large_for_its_quota_is_told_so_soon() -> None:
    clock = Clock()

    def share(pools: Pools, rng: Random) -> SharedState:
        return SharedState(None, "router", PoolFleet(pools), rng, steady_s=clock.steady_s)

    tenants, body = Tenants(otherwise=Tenant(quotas=QUOTAS)), {"messages": CHAT, "max_tokens": 11_000}
    worker = FakeWorker("w", context_length=CONTEXT, kv_token_capacity=CONTEXT)
    async with client(worker, share=share, tenants=tenants) as asks:
        await filled(asks.router.shared, clock)
        told_s = await delay_s(asks, CHATS, body)
        assert APART_S < told_s < APART_S + STEP_S
        clock.pass_s(told_s)
        error = await asks.refusal(CHATS, 429, **body)
        assert "more than the quota" in error["message"]
