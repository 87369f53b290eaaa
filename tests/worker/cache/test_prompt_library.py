"""Prompts without cached context go to the library where the table says so: which rows, and with what result."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.worker.device.cards import H200
from tests.worker.device.faults import DeviceFault, HostSync, LaunchFault, MixedDevices
from tests.worker.device.models import spec_of
from tests.worker.device.session import drive, plans_for, session
from tests.worker.engine_rig import drive as drive_engine
from tests.worker.engine_rig import make_engine, make_submit
from trunkline_kernels.gpu import prompt_attention, tuned_tilings
from trunkline_kernels.gpu.prompt_attention import FreshPrompts
from trunkline_kernels.gpu.ragged_attention import tiles_of
from trunkline_worker.model import gpu_decoder
from trunkline_worker.model.architectures.decoder_spec import DecoderSpec
from trunkline_worker.model.config_json import read_spec
from trunkline_worker.runner.gpu.gpu_runner import GpuRunner
from trunkline_worker.runner.gpu.prefix_groups import PrefixGroups
from trunkline_worker.runner.gpu.row_table import TableRow
from trunkline_worker.runner.gpu.step_inputs import StepLayouts
from trunkline_worker.runner.gpu.step_programs import MIXED_SIZES
from trunkline_worker.settings import EngineSettings
from trunkline_worker.step.plan import Sampling, SequenceStep

DRAW = random.Random(7)
SEED = 1  # of random steps, of which some have several fresh prompts
GRAPH_TOKENS = 32  # of the largest step that has a graph, interpreted


def choose_library(folder: Path, patch: pytest.MonkeyPatch, spec: DecoderSpec, device: str, dtype: torch.dtype) -> None:
    key = prompt_attention.key_of(
        device=device, head_dim=spec.head_dim, group=spec.num_heads // spec.num_kv_heads, dtype=dtype, kv_dtype=dtype
    )
    tuned_tilings.write(folder / "tuned.json", {key: ({}, {})})
    patch.setenv(tuned_tilings.VARIABLE, str(folder / "tuned.json"))


@pytest.fixture
def chosen(shallow_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[FreshPrompts]:
    """The library is chosen; what it was asked to compute in each layer."""
    choose_library(tmp_path, monkeypatch, read_spec(shallow_model), "", torch.float32)
    seen: list[FreshPrompts] = []

    def counted(q: Tensor, keys: Tensor, values: Tensor, fresh: FreshPrompts, **options: Any) -> Tensor:
        seen.append(replace(fresh, starts=fresh.starts.clone()))  # its memory is the next step's too
        return real(q, keys, values, fresh, **options)

    real = prompt_attention.prompt_attention
    monkeypatch.setattr(gpu_decoder, "prompt_attention", counted)
    return seen


def tokens(model: Path, waves: list[list[list[int]]], **options: Any) -> list[dict[int, list[int]]]:
    """Of several waves of prompts, each on what the waves before have left in the cache."""
    engine = make_engine(model, kv_blocks=128, block_size=4, itl_target_ms=0.0, max_step_tokens=128, **options)
    found = []
    for wave in waves:
        submits = [make_submit(handle, prompt, max_tokens=2, ignore_eos=True) for handle, prompt in enumerate(wave)]
        found.append(drive_engine(engine, submits).tokens)
    return found


def prompt(length: int) -> list[int]:
    return [DRAW.randrange(5, 400) for _ in range(length)]


def test_tokens_are_those_of_the_twins(shallow_model: Path, chosen: list[FreshPrompts]) -> None:
    cached = prompt(34)
    # The second wave has a step with a cached context beside fresh prompts; nothing is fresh about one token.
    waves = [[cached], [[*cached, *prompt(5)], prompt(17), prompt(1), prompt(16)]]
    found = tokens(shallow_model, waves, kernels="triton")
    first, second = chosen[0], chosen[-1]
    assert found == tokens(shallow_model, waves, kernels="torch")
    assert first.starts.tolist() == [0, 34]
    assert (first.first_row, first.num_rows, first.longest) == (0, 34, 34)
    assert second.starts.tolist() == [0, 17, 33]
    assert second.first_row > 5, "a token and the rest of a cached prompt come first"


@pytest.mark.parametrize(
    "options", [pytest.param({"deterministic": True}, marks=pytest.mark.slow), {"max_step_tokens": 20}], ids=str
)
def test_some_steps_never_go_there(options: dict[str, Any], shallow_model: Path, chosen: list[FreshPrompts]) -> None:
    """Those whose bits may not depend on how a prompt is cut, and those that a graph computes."""
    engine = make_engine(shallow_model, kernels="triton", kv_blocks=64, itl_target_ms=0.0, **options)
    drive_engine(engine, [make_submit(0, prompt(35), max_tokens=1, ignore_eos=True)])
    assert not chosen


@pytest.mark.parametrize("library", [True, False])
def test_fresh_prompts_come_last_in_a_step_that_has_no_graph(library: bool) -> None:
    class Decoder:
        split, tile_seqs, library_prompts = 0, 8, library
        spec = spec_of("qwen3-8b", layers=1)

        def tiles(self, query_lens: Any, context_lens: Any) -> Any:
            return tiles_of(query_lens, self.tile_seqs)

    layouts = StepLayouts(
        Decoder(), PrefixGroups(np.zeros((9, 9), np.int32), 4), 4, most_graph_tokens=GRAPH_TOKENS,  # type: ignore[arg-type]
    )  # fmt: skip
    computed_and_new = [(0, 20), (7, 1), (16, 5), (0, 12), (0, 1)]
    steps = [SequenceStep(n, 0, computed, new, (), True) for n, (computed, new) in enumerate(computed_and_new)]
    rows = [TableRow(n, n, Sampling(1), 1, [], 1, 0) for n in range(len(steps))]
    layout = layouts.lay_out(steps, rows)
    sequences = set(layout.tiles[:, 0].tolist())
    assert layout.num_decodes == 2
    if library:
        assert layout.order.tolist() == [1, 4, 2, 0, 3]
        assert layout.fresh is not None
        assert (layout.fresh.lens.tolist(), layout.fresh.first_row) == ([20, 12], 7)
        assert sequences == {2}
        assert layout.exact.num_fresh == 2
    else:
        assert layout.order.tolist() == [1, 4, 0, 2, 3]
        assert layout.fresh is None
        assert sequences == {2, 3, 4}
    small = layouts.lay_out(steps[:3], rows[:3])
    assert small.num_tokens <= GRAPH_TOKENS
    assert small.fresh is None


@pytest.mark.slow
def test_steps_with_the_library_keep_the_devices_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of("qwen3-8b", layers=2)
    choose_library(tmp_path, monkeypatch, spec, H200.name, torch.bfloat16)
    options: dict[str, Any] = {"max_step_tokens": 2048, "max_running_requests": 24}
    with session(spec, num_blocks=3000, context_length=4096, **options) as found:
        seen: list[int] = []
        real = prompt_attention.prompt_attention

        def checked(q: Tensor, keys: Tensor, values: Tensor, fresh: FreshPrompts, **others: Any) -> Tensor:
            assert not found.device.timeline.capturing
            starts = found.device.blocks.contents(fresh.starts)
            assert starts is not None
            lens = np.diff(starts)
            assert starts[0] == 0
            assert starts[-1] == len(q) == len(keys) == len(values) == fresh.num_rows
            assert (lens.min(), lens.max()) == (max(lens.min(), 2), fresh.longest)
            assert fresh.starts.dtype == torch.int32
            assert all(x.stride(-1) == 1 for x in (q, keys, values))
            seen.append(len(lens))
            return real(q, keys, values, fresh, **others)

        monkeypatch.setattr(gpu_decoder, "prompt_attention", checked)
        drive(found, plans_for(found, EngineSettings("model", **options), 3000, 4096, SEED), 60)
    assert len(seen) > 4
    assert max(seen) > 1
    assert found.replays > 5
    assert max(MIXED_SIZES) < options["max_step_tokens"]
    assert isinstance(found.runner, GpuRunner)


def knows_its_lengths(q: Tensor, keys: Tensor, values: Tensor, fresh: FreshPrompts, **options: Any) -> Tensor:
    return torch.empty_like(q) if fresh.starts.tolist() else q


def starts_from_the_host(q: Tensor, keys: Tensor, values: Tensor, fresh: FreshPrompts, **options: Any) -> Tensor:
    starts = torch.tensor([0, len(q)], dtype=torch.int32)
    return prompt_attention.prompt_attention(q, keys, values, replace(fresh, starts=starts), **options)


@pytest.mark.parametrize(
    ("fault", "mutant"),
    [(HostSync, knows_its_lengths), (MixedDevices, starts_from_the_host)],
    ids=["waits for the device", "mixes devices"],
)
def test_a_library_that_breaks_the_rules_is_noticed(
    fault: type[DeviceFault], mutant: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of("qwen3-0.6b", layers=1)
    choose_library(tmp_path, monkeypatch, spec, H200.name, torch.bfloat16)
    monkeypatch.setattr(gpu_decoder, "prompt_attention", mutant)
    with pytest.raises(fault), session(spec, max_step_tokens=1024, max_running_requests=4):
        pass  # its warm-up computes such a prompt


def test_kernels_beside_the_library_are_warmed_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of("qwen3-0.6b", layers=1)
    options: dict[str, Any] = {"max_step_tokens": 2048, "max_running_requests": 8}
    with session(spec, num_blocks=3000, context_length=4096, **options) as found:
        found.runner._decoder.library_prompts = True  # only once it is warm
        plans = plans_for(found, EngineSettings("model", **options), 3000, 4096, SEED)
        with pytest.raises(LaunchFault, match=r"_rotary_kv.*compiled while requests wait"):
            drive(found, plans, 200)
