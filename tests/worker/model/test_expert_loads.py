"""How evenly tokens spread over experts: what an engine reports is what the routers of transformers say."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.worker.engine_rig import make_engine, make_submit
from tests.worker.model.checkpoints import VOCAB, write_checkpoint
from trunkline.engine.v1.engine_pb2 import EngineRequest
from trunkline_worker.engine.assembly import build_engine
from trunkline_worker.model import expert_loads
from trunkline_worker.model.architectures.decoder_spec import DecoderSpec
from trunkline_worker.model.cpu_decoder import CpuDecoder
from trunkline_worker.model.expert_loads import ExpertLoads, imbalance
from trunkline_worker.model.loading import load_model
from trunkline_worker.settings import EngineSettings

CPU = torch.device("cpu")
PROMPTS = [[(7 * at + 3 * length) % VOCAB for at in range(length)] for length in (23, 4, 9)]
NUM_TOKENS = sum(map(len, PROMPTS))


def imbalance_of(truth: Any, with_experts: list[int]) -> list[float]:
    """Of each layer, over all tokens of the prompts."""
    logits: dict[int, list[Tensor]] = {layer: [] for layer in with_experts}
    for prompt in PROMPTS:
        found = truth(torch.tensor([prompt]), output_router_logits=True).router_logits
        for layer, of_prompt in zip(with_experts, found, strict=True):
            logits[layer].append(of_prompt)
    told = [0.0] * truth.config.num_hidden_layers
    for layer, parts in logits.items():
        chosen = torch.cat(parts).topk(truth.config.num_experts_per_tok).indices
        counts = torch.bincount(chosen.flatten(), minlength=parts[0].shape[1])
        told[layer] = counts.max().item() / counts.float().mean().item()
    return told


@pytest.mark.parametrize("kernels", ["auto", "triton"])
@pytest.mark.parametrize("options", [{}, {"max_step_tokens": 9}, {"batching": "static", "batch_size": 3}], ids=str)
@torch.inference_mode()
def test_an_engine_reports_the_imbalance_of_each_layer(
    kernels: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = write_checkpoint("qwen3-moe-some-layers", tmp_path)
    monkeypatch.setattr(expert_loads, "WINDOW_TOKENS", NUM_TOKENS)
    engine = make_engine(tmp_path, kernels=kernels, kv_blocks=64, itl_target_ms=0.0, **options)
    # With log-probabilities of prompts, the last layer too computes all tokens.
    submits = [make_submit(n, prompt, max_tokens=1, prompt_logprobs=0) for n, prompt in enumerate(PROMPTS, start=1)]
    engine.accept(EngineRequest(submits=submits))
    told: list[list[float]] = []
    while engine.has_work:
        step = engine.step()
        if step is not None and step.record.expert_imbalance:
            told.append(step.record.expert_imbalance[:])
    assert engine.scheduler.stats.total.padding_tokens > 0 or "batching" not in options
    expected = imbalance_of(truth, with_experts=[1])
    assert told == [pytest.approx(expected)]
    assert expected[0] == 0.0, "a layer without experts"
    assert engine.stats().expert_imbalance == pytest.approx(max(expected))


def test_what_an_engine_computes_before_its_first_request_is_not_counted(tmp_path: Path) -> None:
    write_checkpoint("qwen3-moe", tmp_path)
    model = load_model(tmp_path, device=CPU, dtype="float32")
    settings = EngineSettings(model=str(tmp_path), dtype="float32", device="cpu", kv_blocks=8)
    build_engine(settings, model, CPU, lambda stage: None)  # with a rehearsal
    assert isinstance(model.decoder, CpuDecoder)
    assert not model.decoder.expert_loads.counts.any()


@torch.inference_mode()
def test_a_window_ends_with_the_step_that_fills_it(tmp_path: Path) -> None:
    spec = spec_of("qwen3-moe", tmp_path)
    loads = ExpertLoads(spec, CPU)
    assert spec.routing is not None
    pairs = spec.routing.top_k * expert_loads.WINDOW_TOKENS
    for _ in range(2):
        loads.counts[1, 2] += pairs - spec.routing.top_k
        assert loads.after_step(expert_loads.WINDOW_TOKENS - 1) is None
        loads.counts[1, 2] += spec.routing.top_k
        window = loads.after_step(1)
        assert window is not None
        assert window[1, 2] == window.sum() == pairs, "nothing of the window before"


@torch.inference_mode()
def test_a_last_layer_that_computes_only_sampled_tokens_reports_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint("qwen3-moe", tmp_path)
    monkeypatch.setattr(expert_loads, "WINDOW_TOKENS", NUM_TOKENS)
    told = {}
    for kernels in ("auto", "triton"):
        engine = make_engine(tmp_path, kernels=kernels, kv_blocks=64, itl_target_ms=0.0)
        submits = [make_submit(n, prompt, max_tokens=1) for n, prompt in enumerate(PROMPTS, start=1)]
        engine.accept(EngineRequest(submits=submits))
        while engine.has_work:
            step = engine.step()
            if step is not None and step.record.expert_imbalance:
                told[kernels] = step.record.expert_imbalance[:]
    assert told["auto"][-1] > 0
    assert told["triton"] == [pytest.approx(each) for each in told["auto"][:-1]] + [0.0]


def spec_of(name: str, path: Path) -> DecoderSpec:
    write_checkpoint(name, path)
    return load_model(path, device=CPU, dtype="float32").spec


def test_a_model_without_experts_reports_nothing(tmp_path: Path) -> None:
    loads = ExpertLoads(spec_of("qwen3", tmp_path), CPU)
    assert loads.after_step(10 * expert_loads.WINDOW_TOKENS) is None


def test_an_even_load_is_1_and_the_worst_one_is_the_number_of_experts() -> None:
    loads = torch.tensor([[3, 3, 3, 3], [0, 8, 0, 0], [0, 0, 0, 0], [1, 2, 3, 2]])
    assert imbalance(loads) == (1.0, 4.0, 0.0, 1.5)
