"""Steps in two parts: masks that need the token of the step before, and rows whose mask is late."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.worker.engine_rig import drive, make_engine, make_submit
from tests.worker.fake_executor import VOCAB
from tests.worker.rig import Rig
from tests.worker.sampling_rig import draw, logits_of, row_of
from tests.worker.scheduling.maskers import Climbing, climbs, packed
from trunkline_worker.engine.engine import Engine
from trunkline_worker.runner.sampler import NOTHING_LEFT
from trunkline_worker.runner.step_thread import InlineExecutor, QueueingExecutor

DRAW = random.Random(5)
PROMPTS = [[DRAW.randrange(400) for _ in range(length)] for length in (1, 5, 16, 31, 40, 7)]
MODEL_VOCAB = 2048  # the demo model's


def outputs(engine: Engine, *, late: float, max_tokens: int = 12) -> dict[int, list[int]]:
    """Output tokens by handle; those with an odd handle are constrained."""
    engine.scheduler.masker = masker = Climbing(MODEL_VOCAB, late=late)
    submits = [
        make_submit(
            n, prompt, max_tokens=max_tokens, ignore_eos=True, temperature=n % 3 / 2, logprobs=n % 4 if n > 2 else None
        )
        for n, prompt in enumerate(PROMPTS)
    ]
    tokens = drive(engine, submits).tokens
    for handle, prompt in enumerate(PROMPTS):
        assert climbs(prompt, tokens[handle]) == bool(handle % 2), "the mask of the right tokens, and no other"
        assert len(tokens[handle]) == max_tokens
    assert bool(masker.num_late) == bool(late)
    return tokens


def engine_of(model: Path | None = None, **options: Any) -> Engine:
    options = {"kv_blocks": 64, "block_size": 8, "itl_target_ms": 0.0, "max_step_tokens": 24, **options}
    return make_engine(**options) if model is None else make_engine(model, **options)


@pytest.fixture(scope="module")
def expected() -> dict[int, list[int]]:
    return outputs(engine_of(deterministic=True), late=0.0)


@pytest.mark.parametrize("late", [0.0, 0.4])
@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_masks_are_of_all_tokens_before_however_far_the_engine_runs_ahead(
    expected: dict[int, list[int]], run_ahead: int, late: float
) -> None:
    assert outputs(engine_of(deterministic=True, run_ahead=run_ahead), late=late) == expected


@pytest.mark.parametrize("kind", [InlineExecutor, QueueingExecutor])
def test_every_executor_samples_after_the_step_before_is_committed(
    expected: dict[int, list[int]], kind: type[InlineExecutor | QueueingExecutor]
) -> None:
    engine = engine_of(deterministic=True, run_ahead=1)
    engine.executor = kind(engine.executor._runner, 1)  # type: ignore[attr-defined]
    assert outputs(engine, late=0.3) == expected


def test_without_the_c_kernels() -> None:
    engine = engine_of(kernels="torch", run_ahead=1)
    outputs(engine, late=0.3, max_tokens=4)


@pytest.mark.slow
def test_on_the_gpus_path(shallow_model: Path) -> None:
    found = [
        outputs(engine_of(shallow_model, kernels=kernels), late=late, max_tokens=3)
        for kernels, late in (("triton", 0.3), ("torch", 0.0))
    ]
    assert found[0] == found[1]


def test_a_mask_leaves_only_its_tokens() -> None:
    logits = logits_of(1)
    allowed = np.zeros(logits.shape[1], bool)
    allowed[[3, 140]] = True
    for temperature in (0.0, 1.5):
        row = row_of(temperature=temperature, logprobs=2).under(packed(allowed))
        sampled = draw(logits, [row])
        assert sampled.token_ids[0] in (3, 140)
        top = torch.log_softmax(logits, dim=-1)[0].topk(2)
        assert [token for token, _ in sampled.logprobs[0].top] == top.indices.tolist(), "of the unmasked distribution"
    row = row_of(min_tokens=9, end_token_ids=frozenset({3, 140})).under(packed(allowed))
    assert draw(logits, [row]).errors == {0: NOTHING_LEFT}


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_a_row_whose_mask_is_late_sits_out_and_computes_its_last_token_again(run_ahead: int) -> None:
    rig = Rig(num_blocks=12, run_ahead=run_ahead, max_running=4)
    rig.scheduler.masker = masker = Climbing(VOCAB, late=0.5)
    prompts = {rig.submit(list(range(n % 5 + 1)), 9): list(range(n % 5 + 1)) for n in range(9)}
    rig.run()
    for sequence_id, prompt in prompts.items():
        assert len(rig.outputs[sequence_id]) == 9
        assert sequence_id % 2 == 0 or climbs(prompt, rig.outputs[sequence_id])
    assert masker.num_late > 10
    assert rig.blocks.num_live == 0


def test_an_aged_sequence_that_falls_back_does_not_age_again() -> None:
    rig = Rig(num_blocks=20, max_running=2, aging_s=4.0, aged_tokens=3)
    rig.scheduler.masker = Climbing(VOCAB, late=0.5)
    for n in range(6):
        rig.submit([n] * 6, 20)
    rig.run()
    assert len(rig.finished) == 6
