"""Runs on real models: tokens and log-probabilities equal those of decoding one by one, bit for bit."""

import random
from pathlib import Path
from typing import Any

import pytest

from tests.worker.engine_rig import Collected, drive, make_engine, make_submit
from tests.worker.scheduling.maskers import Climbing
from tests.worker.scheduling.proposers import RandomProposer
from trunkline_worker.cache.sequence import Sequence
from trunkline_worker.engine.engine import Engine
from trunkline_worker.runner.step_thread import QueueingExecutor

VOCAB = 2048  # the demo model's
DRAW = random.Random(9)
PROMPTS = [[DRAW.randrange(400) for _ in range(length)] for length in (1, 15, 16, 33, 70, 5, 9, 12)]
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.95, "logprobs": 2},
    {"temperature": 0.0, "repetition_penalty": 1.4, "frequency_penalty": 0.3},
    {"temperature": 1.0, "presence_penalty": 0.7, "logprobs": 0, "prompt_logprobs": 1},
    {"temperature": 1.0, "logit_bias": {77: 8.0, 78: 8.0}, "top_k": 20},
    {"temperature": 0.7, "min_p": 0.1, "logprobs": 3, "min_tokens": 8, "stop_token_ids": list(range(300, 400))},
    {"temperature": 0.0, "logprobs": 1},
    {"temperature": 1.0},
]

Bits = list[tuple[int, tuple[tuple[int, float], ...]]]


def bits(collected: Collected, handle: int) -> Bits:
    """Each token, with the log-probabilities that came with it."""
    outputs = collected.outputs[handle]
    tokens = [token for output in outputs for token in output.token_ids]
    entries = [entry for output in outputs for entry in output.logprobs]
    found = [tuple((t.token_id, t.logprob) for t in (entry.chosen, *entry.top)) for entry in entries]
    assert len(found) in (0, len(tokens))
    return list(zip(tokens, found or [()] * len(tokens), strict=True))


def generate(engine: Engine, num_prompts: int, max_tokens: int) -> tuple[dict[int, Bits], int]:
    """The bits of each output, and the most tokens that came from one step."""
    submits = [
        make_submit(n, prompt, max_tokens=max_tokens, ignore_eos=True, **PARAMS[n])
        for n, prompt in enumerate(PROMPTS[:num_prompts])
    ]
    collected = drive(engine, submits)
    longest = max(len(output.token_ids) for outputs in collected.outputs.values() for output in outputs)
    return {n: bits(collected, n) for n in range(num_prompts)}, longest


def tokens(found: dict[int, list[Any]]) -> list[int]:
    return [token for handle in sorted(found) for token, _ in found[handle]]


def logprobs(found: dict[int, list[Any]]) -> list[float]:
    return [logprob for handle in sorted(found) for _, told in found[handle] for _, logprob in told]


def check(
    *, model: Path | None = None, late: float | None = None, num_prompts: int = 8, max_tokens: int = 20, **options: Any
) -> None:
    """late: share of late masks; None: there are no masks"""
    options = {"deterministic": True, "kv_blocks": 128, "block_size": 8, "itl_target_ms": 0.0, **options}
    queues = options.pop("queues", False)
    made = [make_engine(**options) if model is None else make_engine(model, **options) for _ in range(2)]
    if late is not None:
        for engine, share in zip(made, (0.0, late), strict=True):
            engine.scheduler.masker = Climbing(VOCAB, late=share)
    one_by_one, longest = generate(made[0], num_prompts, max_tokens)
    assert longest == 1
    if queues:
        made[1].executor = QueueingExecutor(made[1].executor._runner, made[1].executor.run_ahead)  # type: ignore[attr-defined]

    def continuation(sequence: Sequence) -> list[int]:
        return [token for token, _ in one_by_one[sequence.sequence_id][sequence.num_output :]]

    made[1].scheduler.runs.proposer = proposer = RandomProposer(continuation, VOCAB, seed=3)
    found, longest = generate(made[1], num_prompts, max_tokens)
    if options.get("kernels") == "triton":  # the interpreter multiplies with NumPy, whose last bits depend on addresses
        assert tokens(found) == tokens(one_by_one)
        assert logprobs(found) == pytest.approx(logprobs(one_by_one), abs=1e-4)
    else:
        assert found == one_by_one
    assert longest > 3
    assert min(proposer.proposed.values()) > 3


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("late", [None, 0.3])
def test_by_the_c_kernels(run_ahead: int, late: float | None) -> None:
    check(run_ahead=run_ahead, late=late)


def test_in_a_pool_so_small_that_sequences_are_preempted() -> None:
    check(kv_blocks=16, admission="optimistic", max_step_tokens=24)


def test_by_the_reference() -> None:
    check(kernels="torch", num_prompts=4, max_tokens=10)


@pytest.mark.slow
def test_by_the_gpus_runner(shallow_model: Path) -> None:
    check(model=shallow_model, kernels="triton", run_ahead=1, queues=True, num_prompts=4, max_tokens=6, late=0.3)
