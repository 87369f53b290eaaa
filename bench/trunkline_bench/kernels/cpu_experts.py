"""Products of experts on this CPU beside their floor, for each format of weights.

usage: python -m trunkline_bench.kernels.cpu_experts [--threads 1] [--repeats 9]

The floor is the longer of two times: to read the weights of the experts that the tokens use, at the bandwidth of
memory, and to multiply by them, at the rate of a large product in float32. What it takes to unpack quantised weights
is not part of it. Each turn measures bandwidth, rate and time, so that all three have the same neighbours on the
machine. Layers and tokens take turns, so that few weights are still in a cache when they are used again.
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from trunkline_bench.engine.cpu_model import KINDS, QUANTIZED_BYTES
from trunkline_bench.reports.markdown import listed, table
from trunkline_bench.reports.provenance import facts
from trunkline_kernels.cpu.library import library
from trunkline_kernels.cpu.packed_experts import PackedExperts
from trunkline_kernels.cpu.packed_linear import QUANTIZED_BITS, PackedLinear
from trunkline_kernels.quantized_weight import quantize
from trunkline_kernels.routing_rule import RoutingRule

RESULTS = Path(__file__).parents[2] / "results" / "kernels"
ROWS = (1, 16, 64)
RULE = RoutingRule(64, 8, renormalized=True)
HIDDEN, INTERMEDIATE = 1024, 512
EXPERT_PARAMS = 3 * HIDDEN * INTERMEDIATE
LEAST_BYTES = 200e6  # of the layers that take turns: several times a cache
READ_BYTES = 1 << 28  # far more than a cache
CALLS = 16  # of one measured time, each with other tokens
LARGE = 1024  # rows, columns and inputs of the large product


def took_s(function: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    function()
    return time.perf_counter() - started_s


def layers_of(kind: str) -> list[PackedExperts]:
    """Layers of random weights, as many as have LEAST_BYTES."""
    dtype_name, quantization = KINDS[kind]
    dtype = getattr(torch, dtype_name)
    kernels = library(dtype)
    stored = library(dtype, bits=QUANTIZED_BITS[quantization]) if quantization in QUANTIZED_BITS else kernels
    assert kernels is not None
    assert stored is not None

    def weights(out: int, inner: int) -> list[PackedLinear]:
        plain = (torch.randn(out, inner) for _ in range(RULE.num_experts))
        return [
            PackedLinear(stored, quantize(each, quantization) if stored is not kernels else each.to(dtype), None, dtype)
            for each in plain
        ]

    num_layers = round(LEAST_BYTES / (RULE.num_experts * EXPERT_PARAMS * bytes_of(kind))) or 1
    return [
        PackedExperts(kernels, RULE, weights(2 * INTERMEDIATE, HIDDEN), weights(HIDDEN, INTERMEDIATE))
        for _ in range(num_layers)
    ]


def bytes_of(kind: str) -> float:
    """Bytes of a weight."""
    dtype_name, quantization = KINDS[kind]
    itemsize: int = getattr(torch, dtype_name).itemsize
    return QUANTIZED_BYTES.get(quantization, itemsize)


def calls_of(layers: list[PackedExperts], num_rows: int, dtype: torch.dtype) -> tuple[Callable[[], None], float]:
    """Returns a function that multiplies CALLS times, and how many experts a call uses."""
    calls = [
        (
            layers[i % len(layers)],
            torch.randn(num_rows, HIDDEN).to(dtype),
            torch.randn(num_rows, RULE.num_experts).to(dtype),
        )
        for i in range(CALLS)
    ]

    def multiply() -> None:
        for layer, x, logits in calls:
            layer.multiply(x, logits)

    used = [len(set(layer.route(logits).experts.flatten().tolist())) for layer, _, logits in calls]
    return multiply, sum(used) / CALLS


def measured(kind: str, layers: list[PackedExperts], num_rows: int, repeats: int) -> list[float]:
    """Returns medians: milliseconds of a call, to read its weights and to multiply by them, and the floor over the
    time."""
    multiply, used = calls_of(layers, num_rows, getattr(torch, KINDS[kind][0]))
    read, large = torch.ones(READ_BYTES // 4), torch.randn(LARGE, LARGE)
    params = used * EXPERT_PARAMS
    multiply()
    turns = []
    for _ in range(repeats):
        # Each once to wake the threads.
        multiply_s, read_s, large_s = (
            min(took_s(each), took_s(each)) for each in (multiply, read.sum, lambda: large @ large)
        )
        reading_s = params * bytes_of(kind) * read_s / READ_BYTES
        multiplying_s = num_rows * RULE.top_k * EXPERT_PARAMS * large_s / LARGE**3
        call_s = multiply_s / CALLS
        turns.append((1e3 * call_s, 1e3 * reading_s, 1e3 * multiplying_s, max(reading_s, multiplying_s) / call_s))
    return [median(column) for column in zip(*turns, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    found = facts("python -m trunkline_bench.kernels.cpu_experts", "no GPU", ("trunkline", "torch"))
    rows = {}
    for kind in KINDS:
        layers = layers_of(kind)
        for num_rows in ROWS:
            *times_ms, share = measured(kind, layers, num_rows, arguments.repeats)
            rows[f"{kind}, {num_rows}"] = [*(f"{time_ms:.2f}" for time_ms in times_ms), f"{share:.2f}"]
    text = (
        "# Products of experts on a CPU\n\n"
        + listed(found)
        + f"- a token uses {RULE.top_k} of {RULE.num_experts} experts, of {EXPERT_PARAMS / 1e6:.1f} M parameters each\n"
        f"- {arguments.threads} threads; medians of {arguments.repeats} turns of {CALLS} calls each\n\n"
        + table(rows, ["time, ms", "to read, ms", "to multiply, ms", "floor / time"], "weights, tokens")
    )
    print(text)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / f"cpu-experts-{found['date']}.md").write_text(text)


if __name__ == "__main__":
    main()
