"""Finds the fastest tilings of the attention kernels on this device, and writes them to a table.

The table (tuned.json in the output folder) is updated after every candidate; the product sweep adds to it. Engines read
the table that TRUNKLINE_TUNED_TILINGS names, by default trunkline_kernels/gpu/tuned.json of the package.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import TypeVar

import torch
from triton.runtime.errors import OutOfResources

from trunkline_bench.gpu.ceilings import Rows
from trunkline_bench.gpu.kernels.attention import choice_key, library_speed, prompt_flops
from trunkline_bench.gpu.kernels.paged import Decode, Paged, Prefill
from trunkline_bench.gpu.shapes import Shapes, median_s
from trunkline_kernels.gpu import tuned_tilings
from trunkline_kernels.gpu.decode_tiling import DecodeTiling
from trunkline_kernels.gpu.prompt_attention import OWN, library_takes
from trunkline_kernels.gpu.ragged_attention import RaggedTiling
from trunkline_kernels.gpu.tuned_tilings import Key, TilingKey
from trunkline_kernels.quantized_weight import FP8
from trunkline_worker.model.gpu_decoder import FP8_CAPABILITY, Chip

FILE = "tuned.json"
# For 16-bit keys and a head dimension of 128. tiling_resources shows that each compiles for sm_90 without spills, and
# how many programs run at once on a multiprocessor.
DECODE_CANDIDATES = (
    DecodeTiling(64, 4, 3, 3), DecodeTiling(64, 4, 3, 2), DecodeTiling(64, 4, 2, 3), DecodeTiling(64, 4, 4, 2),
    DecodeTiling(32, 4, 4, 3), DecodeTiling(32, 4, 6, 2), DecodeTiling(128, 4, 2, 2), DecodeTiling(64, 8, 3, 2),
    DecodeTiling(64, 4, 3, 3, shortest=64), DecodeTiling(64, 4, 3, 3, shortest=256), DecodeTiling(64, 4, 3, 6),
)  # fmt: skip
# For 8-bit keys, likewise.
NARROW_CANDIDATES = (
    DecodeTiling(64, 4, 2, 3), DecodeTiling(64, 4, 3, 2), DecodeTiling(64, 4, 4, 2), DecodeTiling(32, 4, 3, 3),
    DecodeTiling(32, 4, 4, 3), DecodeTiling(32, 4, 5, 3), DecodeTiling(64, 8, 3, 2), DecodeTiling(128, 8, 3, 1),
)  # fmt: skip
RAGGED_CANDIDATES = (
    RaggedTiling(128, 64, 8, 3), RaggedTiling(128, 64, 8, 2), RaggedTiling(128, 32, 8, 4),
    RaggedTiling(64, 64, 4, 3), RaggedTiling(64, 64, 4, 2),
)  # fmt: skip


Tiling = DecodeTiling | RaggedTiling
AnyTiling = TypeVar("AnyTiling", DecodeTiling, RaggedTiling)


def measure(shapes: Shapes) -> Rows:
    """A row per candidate. The best candidate has the least product of its times over all cases."""
    chip = Chip.of(shapes.device)
    group = shapes.num_heads // shapes.num_kv_heads
    best: dict[Key, tuple[dict[str, int], dict[str, object]]] = {}
    sweeps = [
        ("decode_attention", shapes.dtype, _decodes(shapes, shapes.dtype, DECODE_CANDIDATES)),
        ("ragged_attention", shapes.dtype, _prompts(shapes)),
    ]
    if shapes.tiny or chip.capability >= FP8_CAPABILITY:
        sweeps.insert(0, ("decode_attention", FP8, _decodes(shapes, FP8, NARROW_CANDIDATES)))
    for kernel, kv_dtype, candidates in sweeps:
        key = TilingKey.of(
            kernel, device=chip.name, head_dim=shapes.head_dim, group=group, dtype=shapes.dtype, kv_dtype=kv_dtype
        )
        least = math.inf
        for tiling, times_s, rates in candidates:
            if not times_s:
                yield {"what": kernel, "kv_dtype": key.kv_dtype, **asdict(tiling), **rates}
                continue
            measured = {"us": [round(time_s * 1e6, 1) for time_s in times_s], **rates}
            better = math.prod(times_s) < least
            if better:
                least = math.prod(times_s)
                versions = {name: version(name) for name in ("torch", "triton")}
                best[key] = asdict(tiling), {**measured, **versions}
                tuned_tilings.write(shapes.output / FILE, best)
            yield {"what": kernel, "kv_dtype": key.kv_dtype, **asdict(tiling), **measured, "best_so_far": better}
    yield from _own_or_library(shapes, best, least)


Measured = tuple[Tiling, list[float], dict[str, object]]  # without times if the tiling does not fit the device


def _decodes(shapes: Shapes, kv_dtype: torch.dtype, others: Sequence[DecodeTiling]) -> Iterator[Measured]:
    """Decode cases: many sequences, some long ones, and a single one."""
    cases = [Paged.make(shapes, [context] * batch, kv_dtype) for batch, context in shapes.sweep_decodes]
    for tiling in _candidates(shapes, Decode(shapes, cases[-1]).tiling, others):
        try:
            times_s = [median_s(Decode(shapes, paged, tiling=tiling), shapes.device) for paged in cases]
        except OutOfResources as error:
            yield tiling, [], {"failed": str(error)}
            continue
        rates: dict[str, object] = {
            f"{len(paged.context_lens)} x {paged.context_lens[0]}, gb_per_s": paged.read_bytes() / time_s / 1e9
            for paged, time_s in zip(cases, times_s, strict=True)
        }
        yield tiling, times_s, rates


def _prompts(shapes: Shapes) -> Iterator[Measured]:
    """Prompt cases: several prompts, and one long prompt."""
    cases = [Paged.make(shapes, [length] * count) for count, length in shapes.sweep_prompts]
    for tiling in _candidates(shapes, Prefill(shapes, cases[-1], 1).tiling, RAGGED_CANDIDATES):
        try:
            times_s = [
                median_s(Prefill(shapes, paged, paged.context_lens[0], tiling=tiling), shapes.device) for paged in cases
            ]
        except OutOfResources as error:
            yield tiling, [], {"failed": str(error)}
            continue
        rates: dict[str, object] = {
            f"{count} x {length}, tflop_per_s": prompt_flops(shapes, count, length) / time_s / 1e12
            for (count, length), time_s in zip(shapes.sweep_prompts, times_s, strict=True)
        }
        yield tiling, times_s, rates


def _own_or_library(shapes: Shapes, best: dict[Key, tuple[dict[str, int], dict[str, object]]], own: float) -> Rows:
    """A row: is torch's attention faster for whole prompts?  own: product of the best tiling's times"""
    key = choice_key(shapes)
    if not library_takes(key, shapes.device):
        return
    times_s = [library_speed(shapes, count, length) for count, length in shapes.sweep_prompts]
    known_s = [time_s for time_s in times_s if time_s is not None]
    if len(known_s) < len(times_s):
        return
    measured: dict[str, object] = {"us": [round(time_s * 1e6, 1) for time_s in known_s]}
    measured |= {
        f"{count} x {length}, tflop_per_s": prompt_flops(shapes, count, length) / time_s / 1e12
        for (count, length), time_s in zip(shapes.sweep_prompts, known_s, strict=True)
    }
    chosen = math.prod(known_s) < own
    best[key] = {} if chosen else OWN, {**measured, "torch": version("torch")}
    tuned_tilings.write(shapes.output / FILE, best)
    yield {"what": key.kernel, **measured, "library": chosen}


def _candidates(shapes: Shapes, default: AnyTiling, others: Sequence[AnyTiling]) -> list[AnyTiling]:
    """The engine's default, which others must beat, and on a GPU the other candidates."""
    found = [default]
    if not shapes.tiny:
        found += [other for other in others if other != default]
    return found
