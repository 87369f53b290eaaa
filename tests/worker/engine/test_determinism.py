"""Under --deterministic in float32 a request's tokens and log-probabilities do not depend on what else runs.

Bit for bit: the log-probabilities are compared for equality, not closeness, so a difference in the last bit of a
logit shows even where it does not change the token.
"""

import random
from functools import cache
from typing import Any

import pytest

from tests.worker.engine_rig import Collected, drive, make_engine, make_submit
from trunkline.engine.v1.engine_pb2 import EngineRequest
from trunkline.v1.generation_pb2 import Lane
from trunkline.v1.worker_pb2 import Submit

MAX_TOKENS = 12
NUM_REQUESTS = 64
VOCAB = 500  # ids below this exist in the demo model's vocabulary

GREEDY: dict[str, Any] = {"temperature": 0.0}
SEEDED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 11}


@cache
def prompts() -> list[list[int]]:
    """Mixed lengths around block and tile borders; some share a long prefix."""
    draw = random.Random(7)
    shared = [draw.randrange(VOCAB) for _ in range(40)]
    lengths = [1, 15, 16, 17, 31, 32, 33, 48, 100] + [draw.randrange(2, 90) for _ in range(NUM_REQUESTS - 9)]
    made = [[draw.randrange(VOCAB) for _ in range(length)] for length in lengths]
    return [[*shared, *prompt] if index % 4 == 3 else prompt for index, prompt in enumerate(made)]


def submit(index: int, how: dict[str, Any], output: tuple[int, ...] = ()) -> Submit:
    return make_submit(
        index + 1, prompts()[index], output=output, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=1, **how
    )


def bits(collected: Collected, index: int) -> list[tuple[int, float, int]]:
    """Token, log-probability, likeliest token at each output position."""
    return [
        (entry.chosen.token_id, entry.chosen.logprob, entry.top[0].token_id)
        for output in collected.outputs[index + 1]
        for entry in output.logprobs
    ]


Alone = dict[int, list[tuple[int, float, int]]]  # bits of each picked request
PICKED = (0, 1, 3, 4, 8, 19)  # requests that are also run alone: every kind of length, with and without shared prefix


# What is drawn shows the bits of the logits too, and of the sampling besides: greedy requests take as long again.
HOW = [pytest.param(GREEDY, marks=pytest.mark.slow, id="greedy"), pytest.param(SEEDED, id="seeded")]


@pytest.fixture(scope="module", params=HOW)
def how(request: pytest.FixtureRequest) -> dict[str, Any]:
    param: dict[str, Any] = request.param
    return param


@pytest.fixture(scope="module")
def alone(how: dict[str, Any]) -> Alone:
    """The truth: each request by itself in a fresh engine, its prompt in one piece."""
    found = {}
    for index in PICKED:
        engine = make_engine(deterministic=True, kv_blocks=64)
        found[index] = bits(drive(engine, [submit(index, how)]), index)
        assert len(found[index]) == MAX_TOKENS
    return found


def check(collected: Collected, alone: Alone) -> None:
    for index, expected in alone.items():
        assert bits(collected, index) == expected, f"request {index} differs"


@pytest.mark.parametrize("chunk", [16, pytest.param(512, marks=pytest.mark.slow)])
def test_in_a_batch_of_64_with_the_cache_cold_then_warm(how: dict[str, Any], alone: Alone, chunk: int) -> None:
    engine = make_engine(deterministic=True, kv_blocks=1024, max_step_tokens=max(chunk, 64))
    everything = [submit(index, how) for index in range(NUM_REQUESTS)]
    check(drive(engine, everything), alone)
    warm = drive(engine, everything)
    assert sum(warm.cached.values()) > 1000, "the second time most prompts are cached"
    check(warm, alone)


@pytest.mark.parametrize("chunk", [1, pytest.param(16, marks=pytest.mark.slow), 512])
def test_with_any_chunk_size(how: dict[str, Any], alone: Alone, chunk: int) -> None:
    engine = make_engine(deterministic=True, kv_blocks=256, max_step_tokens=chunk)
    # One by one, the long ones would take a hundred steps each.
    picked = {index: expected for index, expected in alone.items() if chunk > 1 or len(prompts()[index]) < 80}
    assert len(picked) >= 4
    check(drive(engine, [submit(index, how) for index in picked]), picked)


def test_when_the_pool_is_so_small_that_requests_are_preempted(how: dict[str, Any], alone: Alone) -> None:
    # Without a target for the time of a step, slow steps admit as many requests as fast ones.
    engine = make_engine(deterministic=True, kv_blocks=9, max_step_tokens=64, admission="optimistic", itl_target_ms=0.0)
    check(drive(engine, [submit(index, how) for index in PICKED]), alone)
    assert engine.scheduler.stats.preemptions > 0


def test_resumed_from_a_ledger_at_any_token(how: dict[str, Any], alone: Alone) -> None:
    engine = make_engine(deterministic=True, kv_blocks=512, max_step_tokens=512)
    index = 3
    ledger = tuple(token for token, _, _ in alone[index])
    for length in range(1, MAX_TOKENS):
        resumed = drive(engine, [submit(index, how, output=ledger[:length])])
        assert bits(resumed, index) == alone[index][length:], f"resumed after {length} tokens"


def test_while_neighbours_are_aborted(how: dict[str, Any], alone: Alone) -> None:
    engine = make_engine(deterministic=True, kv_blocks=1024, max_step_tokens=128)
    neighbours = iter([index for index in range(NUM_REQUESTS // 2) if index not in alone])

    def abort_one(step: int, collected: Collected) -> None:
        handle = next(neighbours, None)
        if handle is not None:
            engine.accept(EngineRequest(abort_handles=[handle + 1]))

    together = NUM_REQUESTS // 2
    collected = drive(engine, [submit(index, how) for index in range(together)], each_step=abort_one)
    assert len(collected.finished) < together
    check(collected, alone)


@pytest.mark.parametrize("run_ahead", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_with_every_feature_of_the_scheduler_on(how: dict[str, Any], alone: Alone, run_ahead: int) -> None:
    engine = make_engine(
        deterministic=True,
        kv_blocks=24,
        max_step_tokens=48,
        max_running_requests=12,
        run_ahead=run_ahead,
        admission="optimistic",
        interactive_reserve=0.2,
        itl_target_ms=1000.0,  # so far from any step's time that slow steps admit as many requests as fast ones
        aging_s=0.2,
    )
    submits = [submit(index, how) for index in range(NUM_REQUESTS // 2)]
    for index, one in enumerate(submits):
        one.lane = Lane.ValueType(1 + index % 3)
        one.tenant = "ab"[index % 2]
        one.tenant_weight = 1 + index % 2
    check(drive(engine, submits), alone)
    assert engine.scheduler.stats.preemptions > 0


@pytest.mark.parametrize("batching", ["static", pytest.param("static-unpadded", marks=pytest.mark.slow), "dynamic"])
def test_with_every_baseline(how: dict[str, Any], alone: Alone, batching: str) -> None:
    engine = make_engine(deterministic=True, kv_blocks=512, batching=batching, batch_size=4, batch_window_ms=0.0)
    check(drive(engine, [submit(index, how) for index in PICKED]), alone)
    padding = engine.scheduler.stats.total.padding_tokens
    assert (padding > 0) == (batching == "static")


def test_without_the_c_kernels() -> None:
    """Half precision, large heads and hosts without a compiler go this way."""
    options: dict[str, Any] = {"kernels": "torch", "deterministic": True, "kv_blocks": 64}
    picked = PICKED[:3]
    alone = {index: bits(drive(make_engine(**options), [submit(index, SEEDED)]), index) for index in picked}
    engine = make_engine(**options, max_step_tokens=16)
    for _ in range(2):  # the cache cold, then warm
        check(drive(engine, [submit(index, SEEDED) for index in picked]), alone)
