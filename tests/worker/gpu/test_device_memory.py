"""Weights, KV pool, graphs, tables and the largest steps fit a card, as the code that sizes the pool decides it."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.worker.device.cards import A100, CONTEXT_BYTES, H200, RTX_4090, Card
from tests.worker.device.device import FakeDevice
from tests.worker.device.models import NAMES, inventions, model_of, spec_of
from trunkline.sampling_params import EXAMPLES
from trunkline_cli.gpus import memory_share
from trunkline_worker.engine import assembly
from trunkline_worker.engine.assembly import build_engine
from trunkline_worker.engine.rehearsal import activation_bytes, largest_step
from trunkline_worker.model.gpu_decoder import GpuDecoder
from trunkline_worker.model.kv_budget import OutOfMemory
from trunkline_worker.model.loading import LoadedModel
from trunkline_worker.runner.gpu.gpu_runner import GRAPH_POOL_BYTES, GpuRunner
from trunkline_worker.runner.step_thread import WaitingExecutor
from trunkline_worker.settings import EngineSettings
from trunkline_worker.step.plan import Sampling, SequenceStart, SequenceStep, StepPlan

GIB = 1 << 30
EVERYTHING: dict[str, Any] = {
    **EXAMPLES, "logit_bias": tuple((token, 1.0) for token in range(300)), "logprobs": 20,
    "prompt_logprobs": 20,
}  # fmt: skip


@dataclass(slots=True)
class Worker:
    """What one worker takes of a card, bytes."""

    weights: int
    foreseen: int  # beside weights and KV
    kv: int
    kv_tokens: int
    beside: int  # what was taken beside weights and KV, at most
    all: int  # at most, the process's context included


@contextmanager
def placed(card: Card, *, others: int = 0, name: str) -> Iterator[FakeDevice]:
    device = FakeDevice(card, inventions(spec_of(name).vocab_size, seed=1), others=others)
    with device.running():
        yield device
        gc.collect()


def worker_on(
    card: Card, name: str, *, others: int = 0, context_length: int | None = None, warm: bool = False, **options: Any
) -> Worker:
    """A worker is started as the engine process starts it, and runs the largest steps there may be."""
    settings = EngineSettings("model", **options)
    with placed(card, others=others, name=name) as device:
        ledger = device.ledger
        model = model_of(
            spec_of(name), deterministic=settings.deterministic, quantization=settings.quantization,
            kv_dtype=settings.kv_dtype, context_length=context_length,
        )  # fmt: skip
        weights = ledger.allocated
        foreseen = activation_bytes(model, settings)
        runners: list[GpuRunner] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(assembly, "step_runner", lambda *args, **kwargs: kept(runners, *args, **kwargs))
            engine, described = build_engine(settings, model, torch.device("cuda"), (lambda _: None) if warm else None)
        assert isinstance(engine.executor, WaitingExecutor)
        engine.executor.close()
        kv = described.kv_blocks * model.block_format(settings.block_size).num_bytes
        for plan in largest_steps(model, settings, described.kv_blocks):
            runners[-1].begin(plan)()
            runners[-1]._table.apply(StepPlan(0, [], ended=[start.sequence_id for start in plan.starts]))
        return Worker(
            weights, foreseen, kv, described.kv_token_capacity, ledger.peak - weights - kv,
            ledger.peak_reserved + ledger.taken_by_others - others,
        )  # fmt: skip


def kept(runners: list[GpuRunner], model: LoadedModel, settings: EngineSettings, **options: Any) -> GpuRunner:
    runner = GpuRunner(model, settings, num_blocks=options["num_blocks"])
    if options["report"] is not None:
        runner.warm_up(options["report"])
    runners.append(runner)
    return runner


def largest_steps(model: LoadedModel, settings: EngineSettings, num_blocks: int) -> Iterator[StepPlan]:
    """The one that is profiled; one long prompt, or as many as may run, with all that can be asked for; decodes of the
    longest contexts, which share their blocks."""
    yield largest_step(settings, model.context_length)
    size, most = settings.block_size, min(model.context_length, num_blocks * settings.block_size) - 1
    rows = min(settings.max_running_requests, settings.max_step_tokens)
    for count in (1, rows):
        length = min(most, settings.max_step_tokens // count)
        yield plan_of(count, 0, length, range(-(-length // size)), Sampling(1, **EVERYTHING))
    yield plan_of(rows, most - 1, 1, range(-(-most // size)), Sampling(1, **(EVERYTHING | {"prompt_logprobs": None})))


def plan_of(count: int, computed: int, new: int, blocks: range, sampling: Sampling) -> StepPlan:
    """Sequences that are all alike, and share their blocks."""
    tokens = [0] * (computed + new)
    starts = [SequenceStart(n, tokens, len(tokens), list(blocks), sampling) for n in range(count)]
    return StepPlan(0, [SequenceStep(n, 0, computed, new, (), True) for n in range(count)], starts)


SMALL_CARD = [
    pytest.param("qwen3-8b", {"context_length": 32768}, marks=pytest.mark.slow),
    pytest.param("qwen3-8b", {"quantization": "int8"}, marks=pytest.mark.slow),
    pytest.param("llama-3.1-8b", {"context_length": 16384, "deterministic": True}, marks=pytest.mark.slow),
    pytest.param("qwen3-30b-a3b", {"context_length": 8192, "quantization": "int4"}, marks=pytest.mark.slow),
    ("qwen3-0.6b", {}),
]


def check_fits(found: Worker, card: Card) -> None:
    assert found.beside <= found.foreseen, "what the pool's size leaves room for"
    assert found.all <= card.memory


@pytest.mark.slow
def test_a_worker_fits_a_large_card() -> None:
    found = worker_on(H200, "qwen3-8b")
    check_fits(found, H200)
    assert found.kv > 100 * GIB


LARGE: list[dict[str, Any]] = [
    {},
    {"deterministic": True},
    {"deterministic": True, "graphs": "off"},
    {"max_step_tokens": 8192},
    {"kv_dtype": "fp8"},
]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", LARGE, ids=str)
def test_every_model_fits_large_cards(name: str, options: dict[str, Any]) -> None:
    """All options with all models, on one card or the other in turn."""
    card = (H200, A100)[(LARGE.index(options) + NAMES.index(name)) % 2]
    if options.get("kv_dtype") == "fp8" and card is A100:
        options = {"quantization": "int8"}
    check_fits(worker_on(card, name, **options), card)


@pytest.mark.parametrize(("name", "options"), SMALL_CARD, ids=str)
def test_a_worker_fits_a_card_of_24_gigabytes(name: str, options: dict[str, Any]) -> None:
    check_fits(worker_on(RTX_4090, name, **options), RTX_4090)


def test_a_context_that_does_not_fit_is_refused_in_one_line() -> None:
    with pytest.raises(OutOfMemory, match="less than one context of 40960: lower --context-length"):
        worker_on(RTX_4090, "qwen3-8b")


def test_weights_of_experts_are_never_written_as_a_whole() -> None:
    spec = spec_of("qwen3-30b-a3b", layers=1)
    with placed(H200, name="qwen3-30b-a3b"):
        decoder = model_of(spec, quantization="int8", context_length=64).decoder
    assert isinstance(decoder, GpuDecoder)
    assert decoder.widened_bytes == 2 * spec.layers[0].attention.qkv.num_params


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-30b-a3b"])
def test_captured_graphs_stay_within_their_allowance(name: str) -> None:
    """The graphs' tensors. The rest of the allowance is for what the driver keeps of a graph's nodes."""
    plain, warm = worker_on(H200, name), worker_on(H200, name, warm=True)
    check_fits(warm, H200)
    assert warm.beside - plain.beside < GRAPH_POOL_BYTES


SHARED = [
    ("qwen3-8b", H200, {}),
    ("qwen3-0.6b", RTX_4090, {"context_length": 32768}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "card", "options"), SHARED, ids=["H200", "RTX 4090"])
def test_two_workers_share_a_card_alike_in_whatever_order_they_start(
    name: str, card: Card, options: dict[str, Any]
) -> None:
    share = memory_share(("0",), 2, 0)
    assert share is not None
    first = worker_on(card, name, gpu_memory_share=share, **options)
    second = worker_on(card, name, gpu_memory_share=share, others=first.all, **options)
    together = worker_on(card, name, gpu_memory_share=share, others=first.weights + CONTEXT_BYTES, **options)
    assert first.kv == second.kv == together.kv
    assert first.all <= card.memory * share
    for found in (first, second, together):
        check_fits(found, card)
