"""Blocks of a large pool begin further than 32 bits can tell from its first element.

The memory between them is never touched, so none is taken. An address that is computed in 32 bits would be block 0's.
"""

import math

import numpy as np
import pytest
import torch

from tests.kernels.attention_cases import BLOCK
from tests.kernels.attention_rig import attend, decode, truth_of
from trunkline_kernels.cpu.library import library
from trunkline_kernels.gpu.rotary_kv import rotary_kv
from trunkline_kernels.kv_write import write_kv
from trunkline_kernels.paged_attention import paged_attention, plan_attention
from trunkline_kernels.ragged_batch import KVLayer, RaggedBatch
from trunkline_kernels.tiled_attention import tiled_attention

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
STRIDE, FAR = 1 << 30, 4  # elements between blocks; their product is 0 in 32 bits
CONTEXT = BLOCK + 9  # in the far block, then in block 0
TOLERANCE = {torch.float16: 5e-3, torch.bfloat16: 3e-2}


def far_layer(dtype: torch.dtype) -> KVLayer:
    shape, width = (FAR + 1, BLOCK, KV_HEADS, HEAD_DIM), BLOCK * KV_HEADS * HEAD_DIM
    strides = (STRIDE, KV_HEADS * HEAD_DIM, HEAD_DIM, 1)
    memory = torch.empty(FAR * STRIDE + 2 * width, dtype=dtype)
    kv = KVLayer(memory.as_strided(shape, strides), memory.as_strided(shape, strides, width))
    for block in (0, FAR):
        kv.keys[block], kv.values[block] = math.nan, math.nan
    return kv


Case = tuple[torch.Tensor, KVLayer, RaggedBatch, torch.Tensor]


def far_case(dtype: torch.dtype, query_lens: list[int]) -> Case:
    """Queries, layer, batch of sequences with the same keys and values, and their attention."""
    draw, count = torch.Generator().manual_seed(0), len(query_lens)
    k, v = (torch.randn(CONTEXT, KV_HEADS, HEAD_DIM, generator=draw).to(dtype) for _ in range(2))
    kv = far_layer(dtype)
    for pool, x in ((kv.keys, k), (kv.values, v)):
        pool[FAR], pool[0, : CONTEXT - BLOCK] = x[:BLOCK], x[BLOCK:]
    unused = torch.empty(0, dtype=torch.int64)
    batch = RaggedBatch(unused, unused, query_lens, [CONTEXT] * count, torch.tensor([[FAR, 0]] * count), BLOCK)
    q = torch.randn(sum(query_lens), HEADS, HEAD_DIM, generator=draw).to(dtype)
    return q, kv, batch, truth_of(q, batch, [(k, v)] * count).to(dtype)


@pytest.mark.parametrize("query_lens", [[1, 1], [3, 20]])
def test_references(query_lens: list[int]) -> None:
    q, kv, batch, expected = far_case(torch.bfloat16, query_lens)
    scale, tolerance = HEAD_DIM**-0.5, TOLERANCE[torch.bfloat16]
    plan = plan_attention(batch, kv, window=None, dtype=q.dtype)
    for found in (
        paged_attention(q, kv, plan, scale=scale), tiled_attention(q, kv, batch, window=None, scale=scale)
    ):  # fmt: skip
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("query_lens", [[1, 1], [3, 20]])
def test_attention_in_c(query_lens: list[int]) -> None:
    q, kv, batch, expected = far_case(torch.bfloat16, query_lens)
    kernels = library(torch.bfloat16)
    assert kernels is not None
    out, tolerance = torch.full_like(q, math.nan), TOLERANCE[torch.bfloat16]
    tables = np.array([table.data_ptr() for table in batch.block_tables])
    starts, contexts = np.cumsum([0, *query_lens]), np.array(batch.context_lens)
    kernels.attention(
        q.data_ptr(), kv.keys.data_ptr(), kv.values.data_ptr(), tables.ctypes.data, starts.ctypes.data,
        contexts.ctypes.data, out.data_ptr(), kv.block_stride, len(query_lens), HEADS, KV_HEADS, HEAD_DIM, BLOCK, 0,
        HEAD_DIM**-0.5,
    )  # fmt: skip
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("how", ["decode", "shared prefix", "ragged", "split"])
def test_attention_on_a_gpu(how: str) -> None:
    query_lens = [1, 1] if how in ("decode", "shared prefix") else [3, 20]
    q, kv, batch, expected = far_case(torch.float16, query_lens)
    if how == "decode":
        found = decode(q, kv, batch)
    elif how == "shared prefix":
        found = decode(q, kv, batch, shared=[(0, 2, BLOCK)], piece=BLOCK)
    else:
        found = attend(q, kv, batch, split=32 if how == "split" else 0)
    tolerance = TOLERANCE[torch.float16]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("where", ["reference", "c", "gpu"])
def test_keys_and_values_are_written(where: str) -> None:
    """Two tokens, at the end of the far block and at the beginning of block 0, rotated by no angle."""
    dtype = torch.float16 if where == "gpu" else torch.bfloat16
    kv = far_layer(dtype)
    qkv = torch.randn(2, HEADS + 2 * KV_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(0)).to(dtype)
    _, k, v = torch.split(qkv, [HEADS, KV_HEADS, KV_HEADS], dim=1)
    cos, sin = torch.ones(BLOCK + 1, HEAD_DIM // 2), torch.zeros(BLOCK + 1, HEAD_DIM // 2)
    slots = torch.tensor([FAR * BLOCK + BLOCK - 1, 0])
    if where == "reference":
        write_kv(kv, k, v, slots)
    elif where == "gpu":
        rotary_kv(qkv.view(2, -1), kv, torch.tensor([BLOCK - 1, BLOCK]), slots, cos, sin, num_heads=HEADS)
    else:
        kernels, table, q = library(dtype), torch.tensor([FAR, 0]), torch.empty_like(qkv)
        assert kernels is not None
        tables, starts, contexts = np.array([table.data_ptr()]), np.array([0, 2]), np.array([BLOCK + 1])
        kernels.rotate_and_write(
            qkv.data_ptr(), q.data_ptr(), kv.keys.data_ptr(), kv.values.data_ptr(),
            tables.ctypes.data, starts.ctypes.data, contexts.ctypes.data, cos.data_ptr(), sin.data_ptr(), None, None,
            kv.block_stride, 1, HEADS, KV_HEADS, HEAD_DIM, cos.shape[1], BLOCK, 0.0,
        )  # fmt: skip
    for pool, x in ((kv.keys, k), (kv.values, v)):
        assert torch.equal(pool[FAR, -1], x[0])
        assert torch.equal(pool[0, 0], x[1])
        assert pool[FAR, :-1].isnan().all()
        assert pool[0, 1:].isnan().all()
