"""The least work of steps, and the least time that it takes at peak rates."""

from itertools import product

import pytest

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
