"""A worker that says what cannot be costs no other worker's requests anything, and its own a second try."""

import asyncio
import math
from random import Random
from typing import Any

import pytest

from tests.router.cluster import cluster, until
from tests.router.fake_worker import FakeWorker
from tests.router.liar import PROMPT, Liar, innocents
from tests.router.lies import lies
from tests.router.tokenizer_files import VOCAB_SIZE
from trunkline.protocol import PROTOCOL_VERSION
from trunkline.sampling_params import BY_MODEL, TABLE
from trunkline.status import no_worker
from trunkline.v1.fleet_pb2 import ExplainRouteRequest, ListWorkersRequest
from trunkline.v1.generation_pb2 import FinishReason, OutputChunk, PromptReport, SamplingParams
from trunkline.v1.inference_pb2 import GenerateRequest, TokenIds
from trunkline.v1.worker_pb2 import (
    GetModelResponse,
    GrantReport,
    LoadSample,
    SequenceOutput,
    SessionWelcome,
    StepCostModel,
)
from trunkline_router.routing.prefix_index import PrefixIndex, WorkerBlocks
from trunkline_router.routing.route import choose
from trunkline_router.routing.route_request import PolicyName, RouteRequest, RoutingPolicy
from trunkline_router.routing.worker_facts import WorkerTable
from trunkline_router.routing.worker_state import WorkerState
from trunkline_router.workers.claims import (
    MAX_CAPABILITIES,
    MAX_PRICE_PER_HOUR,
    WorkerUnusable,
    check_model,
    load_problem,
    model_problem,
)
from trunkline_router.workers.link_context import LinkLimits

PAIRS = 16  # of a good worker and a liar, before one router: as many models
LIMITS = LinkLimits(inter_token_timeout_s=0.5, slow_start_s=0.0)
HONEST_LOAD = LoadSample(
    running=2,
    waiting=3,
    waiting_uncached_tokens=60,
    kv_live_blocks=10,
    kv_cached_blocks=5,
    kv_free_blocks=100,
    step_time_us=900,
    waiting_tokens=70,
    waiting_by_lane=[1, 1, 1],
    retry_delay_ms_by_lane=[10, 20, 30],
    uncached_tokens_by_lane=[10, 20, 30],
    step_cost=StepCostModel(fixed_s=1e-3, token_s=1e-5, kv_token_s=1e-8, pair_s=1e-10),
    running_kv_tokens=100,
)
HONEST_MODEL = GetModelResponse(
    model="tiny",
    worker_id="liar",
    epoch=1,
    fingerprint="weights-1",
    architecture="FakeForCausalLM",
    vocab_size=VOCAB_SIZE,
    context_length=4096,
    kv_token_capacity=4096,
    block_size=4,
    kv_blocks=1024,
    max_step_tokens=512,
    max_running_requests=16,
    eos_token_ids=[2],
    default_sampling=SamplingParams(**{name: TABLE[name].example for name in BY_MODEL}),
    itl_target_ms=100.0,
    interactive_reserve=0.05,
    batch_window_ms=100.0,
    protocol_version=PROTOCOL_VERSION,
    price_per_hour=2.0,
)
HONEST_REFUSAL = no_worker("going away", retry_delay_ms=1).to_proto()
HONEST_CHUNK = OutputChunk(token_ids=[1, 2], text="xx", finish_reason=FinishReason.FINISH_REASON_STOP, stop_token_id=2)


def by_model(said: list[Any]) -> list[list[tuple[FakeWorker, Liar]]]:
    """For every lie a good worker and one that tells it, in groups that go before one router."""
    pairs = [
        (FakeWorker(f"good-{number}", model=f"m{number}"), Liar(f"liar-{number}", model=f"m{number}", said=lie))
        for number, lie in enumerate(said)
    ]
    return [pairs[start : start + PAIRS] for start in range(0, len(pairs), PAIRS)]


async def serve_beside(said: list[Any]) -> dict[str, str]:
    """Innocents of every model get their answers; returns what is said of each liar, by the worker's name."""
    problems: dict[str, str] = {}
    for group in by_model(said):
        goods, liars = [good for good, _ in group], [liar for _, liar in group]
        ready = (*(True for _ in goods), *(False for _ in liars))
        async with cluster(*goods, *liars, expected=ready, link_limits=LIMITS) as router:
            links = dict(zip((liar.worker_id for liar in liars), router.links[len(goods) :], strict=True))
            for liar in liars:
                liar.may_speak.set()  # the good ones are there first: what must agree, agrees with them
            await until(lambda links=links: all(link.worker or "yet" not in link.problem for link in links.values()))  # type: ignore[misc]
            await asyncio.gather(*(innocents(router, good.model) for good in goods))
            listed = await router.fleet.ListWorkers(ListWorkersRequest())
            names = {link.address: name for name, link in links.items()}
            problems |= {names[one.address]: one.problem for one in listed.workers if one.address in names}
            for good in goods:
                request = GenerateRequest(token_ids=TokenIds(ids=PROMPT), model=good.model)
                await router.fleet.ExplainRoute(ExplainRouteRequest(request=request))
    return problems


def distinct(message: Any) -> list[Any]:
    """Its lies, each once."""
    return list({lie.SerializeToString(deterministic=True): lie for _, lie in lies(message)}.values())


def test_whatever_a_worker_says_of_its_load_is_refused_or_can_be_reckoned_with() -> None:
    rng, refused = Random(0), 0
    for model_name, model in [("honest", HONEST_MODEL), *lies(HONEST_MODEL)]:
        try:
            check_model(model)
        except WorkerUnusable as unusable:
            refused += str(unusable).isprintable()
            continue
        for load_name, load in [("honest", HONEST_LOAD), *lies(HONEST_LOAD)] if rng.random() < 0.015 else []:
            if load_problem(load):
                continue
            states = [WorkerState(each, WorkerBlocks(PrefixIndex())) for each in (HONEST_MODEL, model) * 4]
            states[1].take_load(load, 0.0)
            for lane in range(3):
                request = RouteRequest(PROMPT, 0.0, lane=lane)
                for count in (2, len(states)):
                    table = WorkerTable(
                        [str(n) for n in range(count)], [0.0] * count, [one.row() for one in states[:count]]
                    )
                    plan = choose(request, table, 0, RoutingPolicy(PolicyName.PREDICTED_TTFT), rng)
                    for candidate in plan.candidates:
                        assert math.isfinite(candidate.cost_s), (model_name, load_name)
                        assert 0 <= candidate.queued_tokens < 1 << 64
                        assert 0 <= candidate.running < 1 << 32
    assert refused > 50


def test_a_worker_may_name_capabilities_that_are_not_known_yet_but_not_any_number() -> None:
    model: Any = GetModelResponse()
    model.CopyFrom(HONEST_MODEL)
    model.capabilities[:] = range(MAX_CAPABILITIES)
    model.max_session_grammar_bytes = 1 << 20  # among them are grammars
    assert model_problem(model) is None
    model.capabilities.append(1)
    assert "capabilities" in (model_problem(model) or "")


def test_a_price_that_would_spoil_sums_of_costs_is_refused() -> None:
    for lie in distinct(HONEST_MODEL):
        if model_problem(lie) is None:
            assert 0.0 <= lie.price_per_hour <= MAX_PRICE_PER_HOUR
    for price in (math.nan, math.inf, -math.inf, -1.0, 1e308):
        model = GetModelResponse()
        model.CopyFrom(HONEST_MODEL)
        model.price_per_hour = price
        assert "price_per_hour" in (model_problem(model) or "")


async def test_innocents_are_served_beside_a_worker_that_lies_of_its_model() -> None:
    all_lies = distinct(HONEST_MODEL)
    accepted = [lie for lie in all_lies if not model_problem(lie)]
    refused = [lie for lie in all_lies if model_problem(lie)]
    problems = await serve_beside([*accepted[::6], *refused[::10]])
    assert sum("worker's" in problem for problem in problems.values()) > 5


@pytest.mark.slow
async def test_innocents_are_served_beside_a_worker_that_lies_of_its_load() -> None:
    problems = await serve_beside(distinct(HONEST_LOAD))
    assert sum("allowed" in problem for problem in problems.values()) > 20


async def test_innocents_are_served_beside_a_worker_that_lies_as_it_opens_a_session() -> None:
    problems = await serve_beside(distinct(SessionWelcome(worker_id="w", epoch=1, session=3)))
    assert any("another worker_id" in problem for problem in problems.values())


@pytest.mark.parametrize(
    "honest",
    [
        SequenceOutput(handle=1, chunk=HONEST_CHUNK, prompt=PromptReport(prompt_tokens=6, cached_tokens=1)),
        SequenceOutput(handle=1, error=HONEST_REFUSAL),
        SequenceOutput(handle=1, granted=GrantReport(ended=True, prompt_tokens=3, output_tokens=4)),
    ],
    ids=["output", "error", "grant"],
)
@pytest.mark.parametrize("one_of", [8, pytest.param(1, marks=pytest.mark.slow)])
async def test_innocents_are_served_beside_a_worker_whose_answers_are_lies(honest: SequenceOutput, one_of: int) -> None:
    await serve_beside(distinct(honest)[::one_of])


async def test_a_code_or_an_end_that_is_none_costs_a_second_try_and_no_status_is_missing() -> None:
    for error in ({"code": 0}, {"code": 999}, {"code": -1}, {"code": 13}, {"reason": ""}):
        said = SequenceOutput(handle=1, error=HONEST_REFUSAL)
        for name, value in error.items():
            setattr(said.error, name, value)
        problems = await serve_beside([said])
        assert (
            "requests failed there" in problems["liar-0"] or not problems["liar-0"] or "no sense" in problems["liar-0"]
        )
