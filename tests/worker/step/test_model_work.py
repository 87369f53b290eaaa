"""The least work of steps, and the least time that it takes at peak rates."""

from itertools import product
from pathlib import Path

import pytest

from trunkline_worker.engine.step_floor import model_work
from trunkline_worker.model.architectures.config_json import read_spec
from trunkline_worker.step.model_work import (
    Attended,
    ModelWork,
    PeakRates,
    StepWork,
    kv_token_bytes,
    num_pairs,
    pair_flops,
    peak_rates,
)
from trunkline_worker.step.plan import SequenceStep

REPOSITORY = Path(__file__).parents[3]
# Two layers of 4 query heads and 2 KV heads of 8 elements, hidden 32, intermediate 64, vocabulary 100, in bfloat16.
LAYER = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 64
WORK = ModelWork(
    layer_params=2 * LAYER,
    head_params=3200,
    layer_bytes=2 * 2 * LAYER,
    head_bytes=6400,
    kv_token_bytes=2 * 2 * 2 * 8 * 2,
    pair_flops=2 * 4 * 4 * 8,
)


def test_a_small_models_numbers() -> None:
    assert kv_token_bytes(2, 8, 2) == 64
    assert pair_flops(4, 8) == 128


def test_a_step_of_a_prompt_and_two_decodes() -> None:
    # A chunk of 3 after 5 tokens, with contexts of 6, 7 and 8, and decodes with contexts of 10 and 20.
    steps = [
        SequenceStep(1, 0, 9, 1, (), True),
        SequenceStep(2, 0, 19, 1, (), True),
        SequenceStep(3, 0, 5, 3, (), True),
    ]
    attended = WORK.attended(steps)
    assert attended == Attended(10 + 20 + 8, 10 + 20 + 6 + 7 + 8)
    assert WORK.step(5, 3, attended) == StepWork(
        4 * 9216 + 6400 + 128 * (38 + 5), 2 * 2 * 9216 * 5 + 2 * 3200 * 3 + 256 * 51
    )
    assert WORK.step(5, 0, attended).num_bytes == 4 * 9216 + 128 * 43, "without logits the head is not read"


def test_a_step_reads_the_experts_that_its_tokens_use_and_multiplies_each_token_by_its_own() -> None:
    spec = read_spec(REPOSITORY / "bench/configs/qwen3-30b-a3b")
    assert spec.layer_params + 2 * spec.head_params == pytest.approx(30.5e9, rel=2e-3), "as published, by its name"
    assert spec.token_params + 2 * spec.head_params == pytest.approx(3.3e9, rel=0.02)
    assert spec.routing is not None
    assert [round(128 * spec.routing.used_share(tokens)) for tokens in (1, 16, 64)] == [8, 82, 126]
    dense, experts = spec.layer_params - spec.expert_params, spec.expert_params
    work = model_work(spec, layer_bytes=2 * dense, head_bytes=0, expert_bytes=2 * experts, kv_itemsize=2)
    assert work.layer_flops(1) == 2 * spec.token_params
    assert work.read_bytes(1) == pytest.approx(2 * spec.token_params)
    assert work.read_bytes(64) == pytest.approx(2 * (dense + experts * 126 / 128), rel=1e-3)
    one, many = (work.step(tokens, 0, Attended(0, 0)).num_bytes for tokens in (1, 512))
    assert one == work.read_bytes(1) + work.kv_token_bytes
    assert many == pytest.approx(2 * spec.layer_params + 512 * work.kv_token_bytes)


def test_layers_with_a_window_see_no_more_than_it() -> None:
    for num_computed, num_new, window in product(range(9), range(1, 9), (1, 3, 8, None)):
        most = window or 1000
        seen = sum(min(num_computed + n, most) for n in range(1, num_new + 1))
        assert num_pairs(num_computed, num_new, window) == seen
    half = WORK._replace(windows=(None, 4))
    assert half.has_windows
    # The chunk's first token sees positions 2 to 5 of the layer with a window, its last one 4 to 7.
    assert half.attended([SequenceStep(3, 0, 5, 3, (), False)]) == Attended((8 + 6) / 2, (21 + 12) / 2)


def test_a_step_takes_as_long_as_the_slower_of_memory_and_arithmetic() -> None:
    rates = PeakRates(flops=1e12, bytes_per_s=1e9)
    assert rates.least_s(5e9, 1e12) == 5.0
    assert rates.least_s(5e9, 9e12) == 9.0
    assert PeakRates(bytes_per_s=1e9).least_s(5e9, 9e12) == 5.0
    assert PeakRates().least_s(5e9, 9e12) is None


@pytest.mark.parametrize(
    ("name", "dtype", "quantization", "tflops", "gb_per_s", "expected"),
    [
        ("NVIDIA H200", "bfloat16", "none", None, None, PeakRates(989e12, 4.8e12)),
        ("NVIDIA H200", "float16", "int8", None, None, PeakRates(989e12, 4.8e12)),
        ("NVIDIA H200", "bfloat16", "fp8", None, None, PeakRates(1979e12, 4.8e12)),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", "fp8", None, None, PeakRates(312e12, 2.039e12)),
        ("NVIDIA H200", "float32", "none", None, None, PeakRates(None, 4.8e12)),
        ("NVIDIA H200", "bfloat16", "none", 700.0, None, PeakRates(700e12, 4.8e12)),
        ("NVIDIA H200 MIG 1g.18gb", "bfloat16", "none", None, None, PeakRates()),
        ("", "float32", "none", None, None, PeakRates()),
        ("", "float32", "none", 2.0, 50.0, PeakRates(2e12, 50e9)),
    ],
)
def test_settings_come_before_data_sheets(
    name: str, dtype: str, quantization: str, tflops: float | None, gb_per_s: float | None, expected: PeakRates
) -> None:
    rates = peak_rates(name, dtype=dtype, quantization=quantization, tflops=tflops, gb_per_s=gb_per_s)
    assert rates == expected
