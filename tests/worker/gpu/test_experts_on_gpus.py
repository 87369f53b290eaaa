"""Mixtures of experts on the Triton kernels, interpreted: what the reference decoder computes."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.worker.engine_rig import drive, make_engine, make_submit
from tests.worker.model.checkpoints import write_checkpoint
from trunkline_kernels.expert_routing import Routing
from trunkline_kernels.gpu.expert_choice import route
from trunkline_worker.model import gpu_experts

PROMPTS = [[(7 * at + 3) % 90 + 3 for at in range(length)] for length in (13, 4)]


def found(model: Path, kernels: str, **options: Any) -> tuple[list[float], dict[int, list[int]]]:
    """The log-probabilities of a prompt, and the tokens of both. The last layer of a step without log-probabilities of
    prompts computes only the tokens to sample from."""
    submits = [
        make_submit(1, PROMPTS[0], max_tokens=2, ignore_eos=True, prompt_logprobs=0),
        make_submit(2, PROMPTS[1], max_tokens=4, ignore_eos=True),
    ]
    done = drive(make_engine(model, kernels=kernels, kv_blocks=32, **options), submits)
    return [entry.chosen.logprob for entry in done.outputs[1][0].prompt.logprobs[1:]], done.tokens


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3-moe-some-layers", {"max_step_tokens": 9, "max_running_requests": 3}),  # chunks beside decodes
        pytest.param("qwen3-moe", {}, marks=pytest.mark.slow),
        pytest.param("mixtral-window", {}, marks=pytest.mark.slow),
        pytest.param("olmoe", {}, marks=pytest.mark.slow),
        pytest.param("qwen2-moe", {}, marks=pytest.mark.slow),
        pytest.param("qwen2-moe", {"deterministic": True}, marks=pytest.mark.slow),
        pytest.param("qwen3-moe", {"deterministic": True}, marks=pytest.mark.slow),
        pytest.param("qwen3-moe", {"batching": "static", "batch_size": 3}, marks=pytest.mark.slow),  # padding rows
    ],
)
def test_log_probabilities_and_tokens_are_those_of_the_reference(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    write_checkpoint(name, tmp_path)
    (expected, tokens), (logprobs, same) = (found(tmp_path, kernels, **options) for kernels in ("torch", "triton"))
    assert logprobs == pytest.approx(expected, abs=1e-4)
    assert same == tokens


def test_padding_reads_no_weights_of_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint("qwen3-moe", tmp_path)
    seen: list[tuple[int, int]] = []  # tokens of a step, and those of them that have experts

    def counted(logits: Tensor, *arguments: Any, **options: Any) -> Routing:
        routing = route(logits, *arguments, **options)
        seen.append((len(logits), int((routing.experts[:, 0] < logits.shape[1]).sum())))
        return routing

    monkeypatch.setattr(gpu_experts, "route", counted)
    engine = make_engine(tmp_path, kernels="triton", kv_blocks=8)
    drive(engine, [make_submit(1, PROMPTS[1], max_tokens=2, ignore_eos=True)])
    padded = engine.scheduler.stats.total.padding_tokens
    assert padded == 4
    assert seen[0] == (8, 4)
