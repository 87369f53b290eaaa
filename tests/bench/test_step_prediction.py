"""The prediction of a step: waves, limits by memory and by arithmetic, and the launches of the decoder."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trunkline_bench.kernels import step_table
from trunkline_bench.kernels.device import H200, RANGES, programs_per_multiprocessor
from trunkline_bench.kernels.step_table import Job
from trunkline_bench.kernels.work import Work, product
from trunkline_worker.engine.step_floor import model_work
from trunkline_worker.model.config_json import read_spec
from trunkline_worker.step.model_work import Attended

REPOSITORY = Path(__file__).parents[2]
DEVICE = replace(H200, multiprocessors=10, bytes_per_s=1e12, peak_flops=1e14, fill_s=0.0, node_s=0.0, step_s=0.0)


def test_a_kernel_that_memory_limits_takes_as_long_as_its_bytes() -> None:
    work = Work("copy", programs=20, slots=10, bytes=2e9)
    assert work.seconds(DEVICE) == pytest.approx(2e-3)
    assert replace(work, bytes_share=0.5).seconds(DEVICE) == pytest.approx(4e-3)


def test_a_kernel_that_arithmetic_limits_takes_as_long_as_its_products() -> None:
    work = Work("product", programs=10, slots=10, bytes=1e6, flops=1e11, flops_per_s=5e13)
    assert work.seconds(DEVICE) == pytest.approx(2e-3)
    assert work.roofline_s(DEVICE) == pytest.approx(1e-3)


def test_programs_of_the_last_wave_take_as_long_as_one_alone() -> None:
    whole = Work("attention", programs=20, slots=10, bytes=20e6, least_s=8e-6)
    tail = replace(whole, programs=21, bytes=21e6)
    assert whole.waves == 2
    assert whole.seconds(DEVICE) == pytest.approx(20e-6)
    # One more program would take 1 µs at the memory's speed, but takes 8 µs alone.
    assert tail.seconds(DEVICE) == pytest.approx(28e-6)


def test_programs_without_work_cost_their_start() -> None:
    work = Work("merge", programs=0, slots=10, bytes=0, idle_programs=25)
    assert work.seconds(DEVICE) == pytest.approx(3 * DEVICE.exit_s)


@pytest.mark.parametrize(
    ("warps", "registers", "shared", "expected"),
    [(4, 146, 71_680, 3), (8, 194, 131_072, 1), (8, 32, 32, 8), (1, 19, 0, 32), (4, 255, 0, 2), (2, 32, 0, 32)],
)
def test_programs_of_a_multiprocessor(warps: int, registers: int, shared: int, expected: int) -> None:
    assert programs_per_multiprocessor(H200, warps=warps, registers=registers, shared=shared) == expected


def test_a_merge_at_the_end_is_not_hidden_behind_loads() -> None:
    work = Work("attention", programs=10, slots=10, bytes=1e6)
    assert replace(work, tail_s=3e-6).seconds(DEVICE) == pytest.approx(work.seconds(DEVICE) + 3e-6)


def test_a_launch_that_starts_early_costs_a_smaller_gap() -> None:
    device = replace(DEVICE, node_s=1e-6, dependent_s=4e-7)
    works = [Work("norm", 10, 10, 1e6), Work("product", 10, 10, 1e6, early=True)]
    assert step_table.step_s(works, device) == pytest.approx(2e-6 + 1e-6 + 4e-7)


def test_products_choose_the_tiles_that_take_least() -> None:
    gate_up = product("gate and up", 256, 24_576, 4096, 2, 2, H200)
    # 192 tiles of 128 x 256 are one and a half waves; larger or smaller tiles give whole waves.
    assert gate_up.waves > 0.9
    assert gate_up.waves % 1 > 0.9
    # Few tiles are split over the inner dimension, or most multiprocessors would idle.
    assert product("down", 256, 4096, 12_288, 2, 2, H200).programs > 64
    # One row is limited by the weights' bytes.
    one = product("down", 1, 4096, 12_288, 2, 2, H200)
    assert one.seconds(H200) == pytest.approx(2 * 4096 * 12_288 / H200.bytes_per_s + H200.fill_s, rel=0.05)


def test_a_job_is_its_prompts_and_its_steps() -> None:
    job = step_table.job_prediction(
        step_table.Job(256, 1000, 500), decode_step_s=0.02, prompt_step_s=0.1, prompt_step_tokens=8000
    )
    assert job.prefill_s == pytest.approx(3.2)
    assert job.decode_s == pytest.approx(10.0)
    assert job.tokens_per_s == pytest.approx(256 * 500 / 13.2)


def test_the_table_has_each_kind_of_launch_and_the_sum() -> None:
    works = [Work("norm", 10, 10, 1e6), Work("norm", 10, 10, 1e6), Work("norm", 10, 10, 2e6)]
    lines = step_table.table(works, replace(DEVICE, node_s=1e-3)).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == [
        "| `norm`", "| `norm`, again", "| gaps between launches", "| between steps", "| **one step**"
    ]  # fmt: skip
    assert "**3.00**" in lines[-1]


def test_the_parts_of_an_output_token_add_up_to_the_jobs_rate() -> None:
    decode = [Work("read", 10, 10, 1e9), Work("norm", 10, 10, 1e6), Work("read", 10, 10, 2e9)]
    prompts = [Work("product", 10, 10, 1.0, flops=1e12, flops_per_s=1e14), Work("norm", 10, 10, 1e6)]
    job, device = Job(requests=8, prompt=300, output=200), replace(DEVICE, node_s=1e-5, step_s=1e-4)
    predicted = step_table.job_prediction(
        job,
        decode_step_s=step_table.step_s(decode, device),
        prompt_step_s=step_table.step_s(prompts, device),
        prompt_step_tokens=600,
    )
    lines = step_table.by_output_token(decode, prompts, job, 600, device).splitlines()
    assert lines[2].startswith("| decode, `read` | 375.00 | 78.12 |")  # 3 GB for 8 tokens
    assert float(lines[-1].split(" | ")[1]) == pytest.approx(1e6 / predicted.tokens_per_s, abs=0.01)


def test_the_roofline_of_8_bit_products_is_that_of_their_type() -> None:
    wide, narrow = (product("product", 8192, 4096, 4096, size, 2, H200) for size in (2, 1))
    assert wide.flops == narrow.flops
    assert wide.roofline_s(H200) / narrow.roofline_s(H200) == pytest.approx(H200.peak_fp8_flops / H200.peak_flops)
    assert narrow.seconds(H200) < wide.seconds(H200)


def test_the_ranges_go_from_worse_to_better() -> None:
    works = [Work("read", 1, 1, 1e9), Work("product", 1, 1, 1.0, flops=1e12, flops_per_s=1e14)]
    for name, (worst, best) in RANGES.items():
        changes: list[dict[str, Any]] = [{name: worst}, {name: best}]
        low, high = (step_table.step_s(works, replace(H200, **change)) for change in changes)
        assert low >= high, name
        assert min(worst, best) <= getattr(H200, name) <= max(worst, best), name


RECORD = """
from pathlib import Path
from trunkline_bench.kernels.recorded_step import decode_step, prompt_step, Operation
from trunkline_worker.model.gpu_decoder import Chip
from trunkline_worker.model.config_json import read_spec
spec, chip = read_spec(Path("bench/configs/qwen3-0.6b")), Chip(132, 227 << 10, (9, 0))
for step in (decode_step(spec, chip, batch=8, context=100), prompt_step(spec, chip, tokens=64, prompt=32)):
    names = [item.name if isinstance(item, Operation) else item.kernel.__name__ for item in step.launches]
    products = [item.product for item in step.launches if isinstance(item, Operation) and item.product]
    print(names.count("_rotary_kv"), names.count("_attend_ranges"), names.count("_ragged_attention"),
          names.count("_to_copy"),
          sum(2 * rows * columns * inner for rows, columns, inner in products))
"""


@pytest.mark.slow
def test_a_step_is_recorded_as_the_decoder_launches_it() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", RECORD], env=environment, cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    layers, hidden, intermediate, packed, vocab = 28, 1024, 3072, 4096, 151_936
    layer = hidden * packed + 2048 * hidden + 3 * hidden * intermediate
    decode = 2 * 8 * (layers * layer + vocab * hidden)
    # A worker's metrics count the same operations.
    spec = read_spec(REPOSITORY / "bench/configs/qwen3-0.6b")
    work = model_work(spec, layer_bytes=0, head_bytes=0, expert_bytes=0, kv_itemsize=2)
    assert decode == work.step(8, 8, Attended(0, 0)).flops
    # After the last layer's attention, only the last token of each prompt.
    after_attention = 2048 * hidden + 3 * hidden * intermediate
    prompt = 2 * (64 * layers * layer - 62 * after_attention) + 2 * 2 * vocab * hidden
    # The head writes float32 itself: no launch converts logits.
    assert done.stdout.splitlines() == [f"28 28 0 0 {decode}", f"28 0 28 0 {prompt}"]


EXPERTS = """
from pathlib import Path
from trunkline_bench.kernels.device import H200
from trunkline_bench.kernels.kernel_work import works
from trunkline_bench.kernels.recorded_step import decode_step
from trunkline_worker.model.gpu_decoder import Chip
from trunkline_worker.model.config_json import read_spec
spec, chip = read_spec(Path("bench/configs/qwen3-30b-a3b")), Chip(132, 227 << 10, (9, 0))
for weights in ("bfloat16", "fp8-blocks"):
    step = decode_step(spec, chip, batch=16, context=100, weights=weights)
    products = [work for work in works(step, H200) if "expert_product" in work.name]
    print(len(products), sum(work.bytes for work in products))
"""


@pytest.mark.slow
def test_a_step_reads_the_experts_that_its_tokens_use() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", EXPERTS], env=environment, cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    spec = read_spec(REPOSITORY / "bench/configs/qwen3-30b-a3b")
    rule = spec.routing
    assert rule is not None
    used = spec.expert_params * rule.used_share(16)
    pairs, layers, hidden, intermediate = 16 * rule.top_k, 48, 2048, 768
    for line, size in zip(done.stdout.splitlines(), (2, 1), strict=True):
        count, num_bytes = line.split()
        scales = used * 4 / 128**2 if size == 1 else 0
        moved = layers * (16 * hidden * size + pairs * intermediate * (2 + size) + pairs * hidden * 2)
        assert int(count) == 2 * layers
        assert float(num_bytes) == pytest.approx(used * size + scales + moved)


@pytest.mark.parametrize(
    ("options", "product"),
    [
        ([], "product 16 x 4096 x 1024"),
        (["--weights", "fp8", "--kv-dtype", "fp8"], "quantize_rows"),
        (["--weights", "fp8-blocks"], "persistent_matmul 16 x 4096 x 1024"),
    ],
    ids=["bfloat16", "fp8", "fp8 in blocks"],
)
@pytest.mark.slow
def test_the_page_of_a_step(options: list[str], product: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    module = "trunkline_bench.kernels.resources"
    command = [sys.executable, "-m", module, "--step", "qwen3-0.6b", "--batch", "16", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "output tok/s" in done.stdout
    assert "| `attend_ranges` | 28 |" in done.stdout
    assert f"| `{product}` | " in done.stdout
