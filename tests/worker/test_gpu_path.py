"""The engine on the Triton kernels, interpreted: the same tokens as on the twins."""

import random

import pytest
import torch

from tests.worker.engine_rig import drive, make_engine, make_submit
from trunkline_worker.model.errors import ModelError
from trunkline_worker.model.gpu_decoder import Chip

DRAW = random.Random(3)
PROMPTS = [[DRAW.randrange(5, 400) for _ in range(length)] for length in (1, 16, 17, 33)]


def tokens(prompts: list[list[int]], *, max_tokens: int = 4, **options: object) -> dict[int, list[int]]:
    engine = make_engine(**options)
    submits = [
        make_submit(handle, prompt, max_tokens=max_tokens, ignore_eos=True) for handle, prompt in enumerate(prompts)
    ]
    return drive(engine, submits).tokens


@pytest.fixture(scope="module")
def expected() -> dict[int, list[int]]:
    return tokens(PROMPTS, kernels="torch", kv_blocks=64)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_step_tokens": 7, "max_running_requests": 3},  # chunks beside decodes
        {"kv_blocks": 5},  # preemptions
        {"batching": "static", "batch_size": 3},  # padding rows
        {"deterministic": True},
        {"deterministic": True, "max_step_tokens": 9, "max_running_requests": 3},
    ],
    ids=lambda options: ",".join(options) or "plain",
)
def test_tokens_are_those_of_the_twins(expected: dict[int, list[int]], options: dict[str, object]) -> None:
    assert tokens(PROMPTS, kernels="triton", **{"kv_blocks": 64, **options}) == expected


def test_without_a_gpu_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ModelError, match="kernels=triton needs an NVIDIA or AMD GPU: use --kernels torch, or auto"):
        Chip.of(torch.device("cpu"))
