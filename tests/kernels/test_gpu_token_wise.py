"""The Triton kernels that work on tokens one by one, interpreted, against their references."""

import math

import pytest
import torch
from torch.nn.functional import linear

from tests.kernels.tensors import random
from tests.parameters import one_in
from trunkline_kernels import kv_write, rms_norm, rotary, silu_and_mul
from trunkline_kernels.gpu import rms_norm as gpu_rms_norm
from trunkline_kernels.gpu import silu_and_mul as gpu_silu_and_mul
from trunkline_kernels.gpu.fixed_matmul import TILING, TILINGS, fixed_linear, fixed_tilings, tiling_of
from trunkline_kernels.gpu.matmul_tiling import MatmulTiling
from trunkline_kernels.gpu.rotary_kv import rotary_kv
from trunkline_kernels.ragged_batch import KVLayer

EPS = 1e-5


@pytest.mark.parametrize("shape", [(1, 64), (3, 24), (5, 1000), (2, 4096), (0, 64)])
def test_rms_norm(shape: tuple[int, int]) -> None:
    x, residual, weight = random(*shape), random(*shape, seed=1), random(shape[1])
    torch.testing.assert_close(gpu_rms_norm.rms_norm(x, weight, EPS), rms_norm.rms_norm(x, weight, EPS))
    normed, summed = rms_norm.add_rms_norm(x, residual, weight, EPS)
    torch.testing.assert_close(gpu_rms_norm.add_rms_norm(x, residual, weight, EPS), normed)
    assert torch.equal(residual, summed)


@pytest.mark.parametrize("dim", [64, 1000])
def test_rms_norm_of_some_columns_in_place(dim: int) -> None:
    whole, weight = random(3, dim + 40), random(dim)
    before = whole.clone()
    gpu_rms_norm.rms_norm_in_place(whole[:, 8 : 8 + dim], weight, EPS)
    torch.testing.assert_close(whole[:, 8 : 8 + dim], rms_norm.rms_norm(before[:, 8 : 8 + dim], weight, EPS))
    assert torch.equal(whole[:, :8], before[:, :8])
    assert torch.equal(whole[:, 8 + dim :], before[:, 8 + dim :])


@pytest.mark.parametrize(("rows", "dim"), [(1, 64), (3, 24), (5, 1500), (0, 64)])
def test_silu_and_mul(rows: int, dim: int) -> None:
    gate_up = random(rows, 2 * dim)
    torch.testing.assert_close(gpu_silu_and_mul.silu_and_mul(gate_up), silu_and_mul.silu_and_mul(gate_up))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "columns", "inner"), [(1, 5, 24), (65, 129, 64), (700, 130, 100), (0, 3, 16)])
def test_fixed_linear(rows: int, columns: int, inner: int, biased: bool) -> None:
    x, weight, bias = random(rows, inner), random(columns, inner), random(columns) if biased else None
    torch.testing.assert_close(fixed_linear(x, weight, bias), linear(x, weight, bias), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tiling", TILINGS)
def test_fixed_linear_with_each_tiling(tiling: MatmulTiling) -> None:
    x, weight = random(65, 100), random(130, 100)
    torch.testing.assert_close(fixed_linear(x, weight, tilings=[tiling]), linear(x, weight), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("rows", "columns", "tile"),
    [
        (1, 4096, (64, 16)), (64, 24_576, (64, 64)), (128, 6144, (64, 32)), (255, 151_936, (64, 128)),
        (256, 24_576, (128, 128)), (512, 4096, (64, 128)), (2048, 4096, (128, 256)), (8192, 24_576, (128, 256)),
        (1, 64, (64, 16)),
    ],
)  # fmt: skip
def test_products_under_deterministic_have_enough_tiles(rows: int, columns: int, tile: tuple[int, int]) -> None:
    found = tiling_of(fixed_tilings((9, 0), is_nvidia=True, dtype=torch.bfloat16), rows, columns)
    assert (found.rows, found.columns) == tile


@pytest.mark.parametrize(
    ("capability", "is_nvidia", "dtype"),
    [
        ((8, 0), True, torch.bfloat16),
        ((10, 0), True, torch.bfloat16),
        ((9, 0), False, torch.bfloat16),
        ((9, 0), True, torch.float16),
        ((9, 0), True, torch.float32),
    ],
)
def test_other_devices_and_types_have_one_tiling(
    capability: tuple[int, int], is_nvidia: bool, dtype: torch.dtype
) -> None:
    assert fixed_tilings(capability, is_nvidia=is_nvidia, dtype=dtype) == (TILING,)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(1, 1), (14, 2), *(pytest.param(n, n, marks=pytest.mark.slow) for n in (4, 9))]
)
@pytest.mark.parametrize("sizes", [*one_in(2, [(16, 8), (64, 32), (24, 12), (80, 40)]), (24, 9), (16, 0)])
def test_rotary_and_kv_write(heads: int, kv_heads: int, sizes: tuple[int, int], normed: bool) -> None:
    head_dim, pairs = sizes
    num_tokens, blocks, block_size = 7, 3, 5
    qkv = random(num_tokens, (heads + 2 * kv_heads) * head_dim)
    angles = torch.outer(torch.arange(50.0), random(pairs))
    cos, sin = angles.cos(), angles.sin()
    positions = torch.randint(50, (num_tokens,), generator=torch.Generator().manual_seed(0))
    slots = torch.randperm(blocks * block_size, generator=torch.Generator().manual_seed(0))[:num_tokens]
    shape = (blocks, block_size, kv_heads, head_dim)
    expected = KVLayer(torch.full(shape, math.nan), torch.full(shape, math.nan))
    # Blocks need not lie one after another: here they lie together over three layers.
    whole = torch.full((blocks, 3, 2, *shape[1:]), math.nan)
    found = KVLayer(whole[:, 1, 0], whole[:, 1, 1])
    norms = (random(head_dim), random(head_dim, seed=1)) if normed else (None, None)

    q, k, v = torch.split(qkv.view(num_tokens, -1, head_dim), [heads, kv_heads, kv_heads], dim=1)
    if norms[0] is not None and norms[1] is not None:
        q, k = rms_norm.rms_norm(q, norms[0], EPS), rms_norm.rms_norm(k, norms[1], EPS)
    q, k = (rotary.apply_rotary(x, cos[positions], sin[positions]) for x in (q, k))
    kv_write.write_kv(expected, k[:-1], v[:-1], slots[:-1])

    slots[-1] = -1  # padding: computed, written nowhere
    rotated = rotary_kv(
        qkv, found, positions, slots, cos, sin, num_heads=heads, query_norm=norms[0], key_norm=norms[1], eps=EPS
    )
    torch.testing.assert_close(rotated, q)
    torch.testing.assert_close(found.keys, expected.keys, equal_nan=True)
    torch.testing.assert_close(found.values, expected.values, equal_nan=True)
    assert whole[:, [0, 2]].isnan().all()
