"""The C kernels against their PyTorch references, in both types, on the shapes that engines get wrong.

Every build that this CPU can run is tested: for all that it has, for the x86-64 levels below it, and with the tiles of
wider CPUs, whose vectors the compiler splits.
"""

import ctypes
import math
import platform
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kernels.attention_cases import make_case, naive
from tests.kernels.tensors import masked_logits
from trunkline_kernels import quantized_weight
from trunkline_kernels.cpu import library as library_module
from trunkline_kernels.cpu.library import built, library
from trunkline_kernels.cpu.packed_linear import (
    QUANTIZED_BITS,
    OneDnnLinear,
    PackedLinear,
    pack_for_any_rows,
    pack_for_many_rows,
)
from trunkline_kernels.quantized_weight import GROUP, KINDS, QuantizedWeight, dequantize, packed_int4, quantize
from trunkline_kernels.ragged_batch import KVLayer, RaggedBatch
from trunkline_kernels.rms_norm import add_rms_norm, rms_norm
from trunkline_kernels.rotary import apply_rotary
from trunkline_kernels.silu_and_mul import silu_and_mul
from trunkline_kernels.token_masks import exclude

DTYPES = [torch.float32, torch.bfloat16]
BUILDS = {
    "native": ("native",),
    "x86-64-v3": ("x86-64-v3",),
    "x86-64-v2": ("x86-64-v2",),
    "wide": ("native", "-DLANES=16", "-DTILE=12", "-O1"),  # with -O3, GCC takes half a minute to split the vectors
}
NEEDED_FLAGS = {"x86-64-v3": {"avx2", "bmi2", "fma"}, "x86-64-v2": {"sse4_2", "popcnt"}}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


@pytest.fixture(params=BUILDS)
def build(request: pytest.FixtureRequest) -> str:
    """The name of a build that this CPU can run."""
    name: str = request.param
    needed = NEEDED_FLAGS.get(name, set())
    if needed and (platform.machine() != "x86_64" or not needed <= set(library_module._cpu_flags().split())):
        pytest.skip(f"this CPU is not {name}")
    return name


def kernels_of(dtype: torch.dtype, build: str, bits: int = 0) -> ctypes.CDLL:
    kernels = built(dtype, *BUILDS[build], bits=bits)
    assert kernels is not None
    return kernels


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of threads, which the kernels share with torch."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def attended(kernels: ctypes.CDLL, q: Tensor, kv: KVLayer, batch: RaggedBatch, window: int | None) -> Tensor:
    out = torch.full_like(q, math.nan)
    tables = [table.contiguous() for table in batch.block_tables]
    addresses = np.array([table.data_ptr() for table in tables])
    starts, contexts = np.cumsum([0, *batch.query_lens]), np.array(batch.context_lens)
    kernels.attention(
        q.data_ptr(), kv.keys.data_ptr(), kv.values.data_ptr(), addresses.ctypes.data, starts.ctypes.data,
        contexts.ctypes.data, out.data_ptr(), kv.block_stride, len(tables), *q.shape[1:2], *kv.keys.shape[2:],
        batch.block_size, window or 0, 1 / math.sqrt(q.shape[2]),
    )  # fmt: skip
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (8, 1), (16, 1)])
@pytest.mark.parametrize("window", [None, 1, 7, 40])
def test_attention_equals_a_naive_one(
    dtype: torch.dtype, heads: tuple[int, int], window: int | None, build: str
) -> None:
    shapes = [(1, 1), (1, 15), (1, 16), (1, 17), (5, 5), (3, 40), (33, 33), (20, 97), (1, 200)]
    check_attention(kernels_of(dtype, build), dtype, shapes, heads, window)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [1, 8, 16, 33, 40, 64, 80, 128, 200, 256])
@pytest.mark.parametrize("block_size", [1, 8, 24])
def test_attention_equals_a_naive_one_whatever_the_sizes_of_heads_and_blocks(
    dtype: torch.dtype, head_dim: int, block_size: int, build: str
) -> None:
    shapes = [(1, 1), (1, 41), (9, 30), (1, 100)]
    check_attention(kernels_of(dtype, build), dtype, shapes, (5, 1), 40, head_dim=head_dim, block_size=block_size)


def check_attention(
    kernels: ctypes.CDLL,
    dtype: torch.dtype,
    shapes: list[tuple[int, int]],
    heads: tuple[int, int],
    window: int | None,
    **sizes: int,
) -> None:
    """Compares the attention of random sequences with a naive one. Places that hold no key are NaN."""
    q, kv, batch, truth = make_case(shapes, *heads, dtype, **sizes)
    out = attended(kernels, q, kv, batch, window)
    starts = np.cumsum([0, *batch.query_lens])
    for i, (query_len, context) in enumerate(shapes):
        k, v = (x.to(dtype) for x in truth[i])
        expected = naive(q[starts[i] : starts[i + 1]], k, v, context - query_len, window)
        torch.testing.assert_close(
            out[starts[i] : starts[i + 1]].double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [24, 64])
def test_keys_and_values_that_a_query_does_not_see_do_not_matter(dtype: torch.dtype, head_dim: int, build: str) -> None:
    kernels, window = kernels_of(dtype, build), 5
    q, kv, batch, _ = make_case([(12, 44)], 6, 2, dtype, head_dim=head_dim)
    expected = attended(kernels, q, kv, batch, window)
    of_token = batch.block_tables[0, 36 // 16], 36 % 16  # the fifth of the queries is this token
    kv.keys[of_token], kv.values[of_token] = math.nan, math.inf
    found = attended(kernels, q, kv, batch, window)
    assert torch.equal(found[:4], expected[:4]), "earlier queries"
    assert found[4:9].isnan().all()
    assert torch.equal(found[9:], expected[9:]), "the token is outside the window of later queries"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(9, 3), (4, 4), (14, 2), (16, 1)])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("head_dim", [24, 40])
def test_no_bit_of_attention_depends_on_other_sequences_or_threads(
    dtype: torch.dtype, heads: tuple[int, int], window: int | None, head_dim: int, build: str,
    threads: Callable[[int], None],
) -> None:  # fmt: skip
    kernels, shapes = kernels_of(dtype, build), [(1, 200), (1, 5), (3, 70), (9, 33), (1, 64)]
    q, kv, batch, _ = make_case(shapes, *heads, dtype, head_dim=head_dim)
    threads(1)
    together = attended(kernels, q, kv, batch, window)
    assert together.isfinite().all()
    starts = np.cumsum([0, *batch.query_lens])
    for number in (1, 2, 3, 5, 20):
        threads(number)
        assert torch.equal(attended(kernels, q, kv, batch, window), together), f"{number} threads"
        for i, (query_len, context) in enumerate(shapes):
            rows = slice(starts[i], starts[i + 1])
            alone = replace(
                batch, query_lens=[query_len], context_lens=[context], block_tables=batch.block_tables[i : i + 1]
            )
            found = attended(kernels, q[rows].contiguous(), kv, alone, window)
            assert torch.equal(found, together[rows]), f"{number} threads, {shapes[i]}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "dim"), [(1, 8), (3, 24), (17, 384)])
def test_norm_gate_and_argmax_equal_their_twins(dtype: torch.dtype, rows: int, dim: int, build: str) -> None:
    kernels = kernels_of(dtype, build)
    torch.manual_seed(0)
    x, residual, weight = torch.randn(rows, dim), torch.randn(rows, dim), torch.rand(dim) + 0.5
    x, residual, weight = (t.to(dtype) for t in (x, residual, weight))
    expected, expected_residual = add_rms_norm(x, residual, weight, 1e-6)
    plain = rms_norm(residual, weight, 1e-6)
    out, plain_out = torch.full_like(x, math.nan), torch.full_like(x, math.nan)
    kernels.add_rms_norm(None, residual.data_ptr(), weight.data_ptr(), plain_out.data_ptr(), rows, dim, dim, 1e-6)
    kernels.add_rms_norm(x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, dim, dim, 1e-6)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(plain_out, plain, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(residual, expected_residual, atol=tolerance, rtol=tolerance)

    wide = torch.randn(rows, dim + 5).to(dtype)
    some, normed = wide[:, 2 : 2 + dim], wide.clone()
    normed[:, 2 : 2 + dim] = rms_norm(some, weight, 1e-6)
    kernels.add_rms_norm(None, some.data_ptr(), weight.data_ptr(), some.data_ptr(), rows, dim + 5, dim, 1e-6)
    torch.testing.assert_close(wide, normed, atol=tolerance, rtol=tolerance)

    gate_up = torch.randn(rows, 2 * dim).to(dtype) * 20
    gated = torch.full_like(x, math.nan)
    kernels.silu_and_mul(gate_up.data_ptr(), gated.data_ptr(), rows, dim)
    torch.testing.assert_close(gated, silu_and_mul(gate_up), atol=tolerance, rtol=tolerance)

    logits = torch.randn(rows + 3, 1000).to(dtype)
    logits[0] = -5.0
    logits[0, [17, 400]] = 3.0
    logits[1, 5], logits[2, 999] = math.nan, math.inf
    ids = torch.empty(len(logits), dtype=torch.int64)
    kernels.greedy(logits.data_ptr(), ids.data_ptr(), len(logits), 1000)
    assert ids[:3].tolist() == [17, -1, -1], "the first of equals; a row that is not finite has none"
    assert torch.equal(ids[3:], logits[3:].argmax(-1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_words", [1, 32, 94])
@pytest.mark.parametrize("vocab", [1, 31, 33, 1024, 3001])
def test_masks_leave_what_the_reference_leaves(dtype: torch.dtype, num_words: int, vocab: int, build: str) -> None:
    kernels = kernels_of(dtype, build)
    logits, masks = masked_logits(vocab, num_words)
    expected = logits.clone()
    exclude(expected, masks)
    found = logits.clone()
    arguments = (masks.rows.data_ptr(), masks.words.data_ptr())
    kernels.exclude(found.data_ptr(), *arguments, *masks.words.shape, vocab)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))

    logits = logits.to(dtype)
    ids = torch.empty(len(logits), dtype=torch.int64)
    kernels.greedy(logits.data_ptr(), ids.data_ptr(), len(logits), vocab)
    plain = ids.clone()
    kernels.greedy_allowed(logits.data_ptr(), *arguments, ids.data_ptr(), *masks.words.shape, vocab)
    left = expected.to(dtype)
    for row, (before, after) in enumerate(zip(plain.tolist(), ids.tolist(), strict=True)):
        if row not in masks.rows or before < 0:
            assert after == before, "other rows, and rows that are not finite, stay as they are"
        else:
            assert after == (int(left[row].argmax()) if left[row].max() > -math.inf else -2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("pairs", [8, 3, 0])
def test_rotation_and_writing_equal_their_twins(dtype: torch.dtype, with_norm: bool, pairs: int, build: str) -> None:
    kernels = kernels_of(dtype, build)
    torch.manual_seed(1)
    heads, kv_heads, dim, block = 4, 2, 16, 4
    shapes = [(1, 9), (3, 5), (6, 6)]
    starts, contexts = np.cumsum([0, *(n for n, _ in shapes)]), np.array([c for _, c in shapes])
    rows = int(starts[-1])
    qkv = torch.randn(rows, heads + 2 * kv_heads, dim).to(dtype)
    tables = [torch.tensor([7, 2, 5]), torch.tensor([1, 3]), torch.tensor([0, 6])]
    addresses = np.array([table.data_ptr() for table in tables])
    blocks = torch.full((9, 3, 2, block, kv_heads, dim), math.nan).to(dtype)  # of three layers
    keys, values = blocks[:, 1, 0], blocks[:, 1, 1]
    q = torch.full((rows, heads, dim), math.nan).to(dtype)
    angles = torch.outer(torch.arange(16).float(), torch.rand(pairs))
    cos, sin = angles.cos(), angles.sin()
    query_norm, key_norm = ((torch.rand(dim) + 0.5).to(dtype) for _ in range(2))
    kernels.rotate_and_write(
        qkv.data_ptr(), q.data_ptr(), keys.data_ptr(), values.data_ptr(), addresses.ctypes.data, starts.ctypes.data,
        contexts.ctypes.data, cos.data_ptr(), sin.data_ptr(), query_norm.data_ptr() if with_norm else None,
        key_norm.data_ptr() if with_norm else None, keys.stride(0), len(shapes), heads, kv_heads, dim, pairs, block,
        1e-6,
    )  # fmt: skip
    positions = torch.cat([torch.arange(context - n, context) for n, context in shapes])
    expected_q, expected_k, expected_v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
    if with_norm:
        expected_q, expected_k = rms_norm(expected_q, query_norm, 1e-6), rms_norm(expected_k, key_norm, 1e-6)
    expected_q, expected_k = (apply_rotary(x, cos[positions], sin[positions]) for x in (expected_q, expected_k))
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(q, expected_q, atol=tolerance, rtol=tolerance)
    written = 0
    for i, (n, context) in enumerate(shapes):
        for j in range(n):
            position = context - n + j
            at = int(tables[i][position // block]), position % block
            torch.testing.assert_close(keys[at], expected_k[starts[i] + j], atol=tolerance, rtol=tolerance)
            assert torch.equal(values[at], expected_v[starts[i] + j])
            written += 1
    assert int(torch.isfinite(blocks).all(-1).all(-1).sum()) == 2 * written, "nothing else is touched"


# Widths around the sizes of panels and pairs; numbers of rows around the sizes of tiles.
SHAPES = [(1, 1), (17, 33), (35, 64), (96, 40), (200, 577), (5, 9001)]
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 25, 49, 130)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_out", "num_in"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_equal_plain_ones_and_no_row_depends_on_others(
    dtype: torch.dtype, num_out: int, num_in: int, with_bias: bool, build: str
) -> None:
    torch.manual_seed(2)
    weight, bias = torch.randn(num_out, num_in).to(dtype), torch.randn(num_out).to(dtype) if with_bias else None
    x = torch.randn(max(ROWS), num_in).to(dtype)
    product = PackedLinear(kernels_of(dtype, build), weight, bias, dtype)
    together = product.multiply(x)
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 2**-8}[dtype]  # a rounding of the result, in bfloat16
    scale = num_in**0.5
    torch.testing.assert_close(together.double(), exact, atol=tolerance * scale, rtol=tolerance)
    for rows in ROWS:
        assert torch.equal(product.multiply(x[-rows:]), together[-rows:]), f"{rows} rows"
    assert product.multiply(x[:0]).shape == (0, num_out)


@pytest.mark.parametrize("kind", KINDS)
def test_a_large_weight_is_quantized_as_its_columns_are(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(11, 128)
    at_once = quantize(weight, kind)
    monkeypatch.setattr(quantized_weight, "COLUMNS_AT_ONCE", 4)
    in_slices = quantize(weight, kind)
    assert torch.equal(in_slices.data.view(torch.uint8), at_once.data.view(torch.uint8))
    assert torch.equal(in_slices.scale, at_once.scale)


def quantized(kind: str, num_out: int, num_in: int, group: int) -> QuantizedWeight:
    """A weight of random stored values. int4 has offsets in groups of 32, and zero points unless the group is that of
    quantize()."""
    if not group:
        return quantize(torch.randn(num_out, num_in), kind)
    num_groups = num_in // group
    scale = torch.rand(num_out, num_groups) + 0.1
    if kind == "int8":
        data = torch.randint(-128, 128, (num_out, num_in), dtype=torch.int8)
        return QuantizedWeight(kind, data, scale, num_in, group)
    values = torch.randint(0, 16, (num_out, num_in), dtype=torch.uint8)
    if group == 32:
        return packed_int4(values, scale, offset=torch.randn(num_out, num_groups))
    zero = None if group == GROUP else torch.randint(0, 16, (num_out, num_groups), dtype=torch.uint8)
    return packed_int4(values, scale, zero)


QUANTIZED = [
    ("int8", 1, 1, 0),
    ("int8", 35, 67, 0),
    ("int8", 100, 2050, 0),
    ("int8", 40, 576, 32),
    ("int8", 5, 1040, 16),
    ("int4", 5, 64, 32),
    ("int4", 70, 1088, 32),
    ("int4", 67, 640, 128),
    ("int4", 33, 1024, 512),
    ("int4", 96, 192, 64),
    ("int4", 3, 960, 160),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "num_out", "num_in", "group"), QUANTIZED)
def test_products_with_quantised_weights_equal_plain_ones_and_no_row_depends_on_others(
    dtype: torch.dtype, kind: str, num_out: int, num_in: int, group: int, build: str
) -> None:
    torch.manual_seed(3)
    weight, bias = quantized(kind, num_out, num_in, group), torch.randn(num_out).to(dtype) if num_out % 2 else None
    x = torch.randn(max(ROWS), num_in).to(dtype)
    product = PackedLinear(kernels_of(dtype, build, QUANTIZED_BITS[kind]), weight, bias, dtype)
    together = product.multiply(x)
    exact = torch.nn.functional.linear(x.double(), dequantize(weight).double(), None if bias is None else bias.double())
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 2**-8}[dtype]
    scale = float(exact.abs().max())
    torch.testing.assert_close(together.double(), exact, atol=tolerance * scale, rtol=tolerance)
    for rows in ROWS:
        assert torch.equal(product.multiply(x[-rows:]), together[-rows:]), f"{rows} rows"
    assert product.multiply(x[:0]).shape == (0, num_out)


@pytest.mark.parametrize("kind", QUANTIZED_BITS)
def test_bfloat16_inputs_of_quantised_weights_are_exact_down_to_a_share_of_the_largest(kind: str, build: str) -> None:
    torch.manual_seed(4)
    weight = quantized(kind, 40, 192, 64)
    product = PackedLinear(kernels_of(torch.bfloat16, build, QUANTIZED_BITS[kind]), weight, None, torch.bfloat16)
    x = torch.exp2(torch.randint(-7, 1, (9, 192))) * (1 + torch.randint(0, 128, (9, 192)) / 128)
    x *= torch.randint(0, 2, x.shape) * 2 - 1
    x[:, ::64] = 1.0
    x[1], x[2], x[3] = x[1] * 2.0**-110, x[2] * 2.0**100, 0.0
    x[4, :64] *= 2.0**60  # each block has a power of its own
    x[5, 7], x[6, 100], x[7, 191] = math.nan, math.inf, -math.inf
    x = x.bfloat16()
    result = product.multiply(x).double()
    exact = x.double() @ dequantize(weight).double().T
    for row in (0, 1, 2, 3, 4, 8):
        size = float((x[row].double().abs() @ dequantize(weight).double().abs().T).max())
        torch.testing.assert_close(result[row], exact[row], rtol=2**-8, atol=1e-6 * size)
    assert result[5:8].isnan().all()

    rounded = torch.full((1, 192), 2.0**-15)
    rounded[0, 0], small = 1.0, torch.zeros(1, 192)
    small[0, 0] = 1.0
    small[0, 64:] = 2.0**-15  # the largest of their blocks
    assert torch.equal(product.multiply(rounded.bfloat16()), product.multiply(small.bfloat16()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_that_are_not_finite_stay_in_their_rows_and_outputs(dtype: torch.dtype, build: str) -> None:
    weight, x = torch.ones(37, 33).to(dtype), torch.ones(7, 33).to(dtype)
    weight[5, 32], x[3, 32] = math.inf, math.nan
    result = PackedLinear(kernels_of(dtype, build), weight, None, dtype).multiply(x)
    assert result[3].isnan().all()
    assert result[[0, 1, 2, 4, 5, 6], 5].isinf().all()
    result[3], result[:, 5] = 33.0, 33.0
    assert (result == 33.0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_many_rows_equal_plain_ones(dtype: torch.dtype, build: str) -> None:
    torch.manual_seed(4)
    kernels = kernels_of(dtype, build)
    weight, bias, x = torch.randn(96, 40).to(dtype), torch.randn(96).to(dtype), torch.randn(300, 40).to(dtype)
    product = pack_for_many_rows(kernels, weight, bias)
    if dtype is torch.float32:  # of a build with smaller vectors, torch's linear() is the fastest
        assert isinstance(product, OneDnnLinear) == kernels.has_wide_vectors() == (product is not None)
    else:
        assert isinstance(product, OneDnnLinear if kernels.has_bfloat16_products() else PackedLinear)
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    for found in (product, pack_for_any_rows(kernels, weight, bias)):
        if found is not None:
            tolerance = {torch.float32: 2e-5, torch.bfloat16: 2**-7}[dtype]
            torch.testing.assert_close(found.multiply(x).double(), exact, atol=tolerance, rtol=tolerance)


def test_without_a_compiler_one_warning_says_so_and_the_twins_serve(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.delenv("TRUNKLINE_MARCH", raising=False)
    monkeypatch.setenv("TRUNKLINE_CACHE_DIR", str(tmp_path))
    built.cache_clear()
    try:
        with pytest.warns(UserWarning, match="cannot compile the C kernels"):
            assert library(torch.float32) is None
        assert library(torch.float16) is None
    finally:
        built.cache_clear()


@pytest.mark.parametrize(
    ("march", "problem"),
    [("x86-64-v9", "the compiler refuses it"), ("sapphirerapids", "this CPU lacks AVX512")],
)
def test_a_build_that_this_cpu_cannot_run_is_refused_by_name(
    march: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if problem.startswith("this CPU lacks") and (
        platform.machine() != "x86_64" or "avx512_fp16" in library_module._cpu_flags().split()
    ):
        pytest.skip("this CPU can run the build")
    monkeypatch.setenv("TRUNKLINE_MARCH", march)
    with pytest.raises(ValueError, match=f"TRUNKLINE_MARCH={march}: {problem}"):
        library(torch.float32)


def test_an_empty_choice_of_a_build_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUNKLINE_MARCH", "")
    assert library(torch.float32) is built(torch.float32, "native", bits=0)


def test_what_the_kernel_cannot_read_is_refused() -> None:
    product = PackedLinear(kernels_of(torch.float32, "native"), torch.ones(3, 8), None, torch.float32)
    for x in (torch.ones(2, 8, dtype=torch.bfloat16), torch.ones(8, 2).T, torch.ones(2, 9)):
        with pytest.raises(AssertionError):
            product.multiply(x)


def test_code_that_others_could_have_put_there_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setenv("TRUNKLINE_CACHE_DIR", str(tmp_path))
    built.cache_clear()
    try:
        assert library(torch.float32) is not None
        assert not list(tmp_path.iterdir())
    finally:
        built.cache_clear()


def test_a_user_without_a_home_has_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("TRUNKLINE_CACHE_DIR", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert library_module._private_folder() is None
