"""Query and key norms, rotary embedding, and writes of keys and values to the paged pool, in one pass.

Reference: rms_norm, apply_rotary and write_kv of trunkline_kernels, in this order. Source of rotary embedding: Su et
al., 2021, in the half-split layout of Hugging Face checkpoints.
"""

import triton
import triton.language as tl
from torch import Tensor

from trunkline_kernels.gpu.dependent_launch import launch_options, wait_for_inputs
from trunkline_kernels.ragged_batch import KVLayer

HEADS_PER_PROGRAM = 8


@triton.jit
def _normed(first, second, norm, first_at, second_at, inside, eps, HEAD_DIM: tl.constexpr, dtype: tl.constexpr):
    """Returns both halves of each head, divided by the head's root mean square, times `norm`; rounded like the
    reference."""
    scale = tl.rsqrt((tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / HEAD_DIM + eps)[:, None]
    first_weight = tl.load(norm + first_at, mask=inside, other=0.0)[None, :]
    second_weight = tl.load(norm + second_at, mask=inside, other=0.0)[None, :]
    first = ((first * scale).to(dtype) * first_weight).to(tl.float32)
    second = ((second * scale).to(dtype) * second_weight).to(tl.float32)
    return first, second


@triton.jit
def _rotary_kv(
    qkv,  # [num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM] ← rotated keys, if KEEP
    q_out,  # [num_tokens, NUM_HEADS, HEAD_DIM]
    keys, values,  # the pool: [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM]
    positions,  # [num_tokens] int64
    slots,  # [num_tokens] int64; negative: the token is padding, nothing is written
    cos, sin,  # [context_length, PAIRS] float32
    query_norm, key_norm,  # [HEAD_DIM]; not read unless NORM
    eps,
    key_scale, value_scale,  # [1] float32: keys and values are divided by them; not read unless SCALED
    block_stride,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,  # elements i and i + PAIRS of a head are rotated; what is behind them stays
    PADDED_HALF: tl.constexpr,  # HEAD_DIM / 2, padded to a power of two
    NORM: tl.constexpr,
    SCALED: tl.constexpr,
    KEEP: tl.constexpr,
    HEADS: tl.constexpr,  # of a program
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: (num_tokens, groups of HEADS heads: of the queries, then of the keys, then of the values)."""
    wait_for_inputs(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    HALF: tl.constexpr = HEAD_DIM // 2
    TOTAL: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    QUERY_GROUPS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    KEY_GROUPS: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    dtype: tl.constexpr = qkv.dtype.element_ty
    at = tl.arange(0, PADDED_HALF)
    inside = at < HALF
    # Elements of a head, in two halves: element `at` of one is rotated with that of the other, or neither is.
    first_at, second_at = at, at + HALF
    if PAIRS < HALF:
        first_at = tl.where(at < PAIRS, at, at + PAIRS)
        second_at = tl.where(at < PAIRS, at + PAIRS, at + HALF)
    slot = tl.load(slots + token)
    row = qkv + token * TOTAL * HEAD_DIM
    is_query = group < QUERY_GROUPS
    is_key = (group >= QUERY_GROUPS) & (group < QUERY_GROUPS + KEY_GROUPS)
    within = tl.where(is_query, group, (group - QUERY_GROUPS) % KEY_GROUPS) * HEADS + tl.arange(0, HEADS)
    known = (within < tl.where(is_query, NUM_HEADS, NUM_KV_HEADS))[:, None] & inside[None, :]
    offset = tl.where(is_query, 0, tl.where(is_key, NUM_HEADS, NUM_HEADS + NUM_KV_HEADS))
    source = row + (offset + within)[:, None] * HEAD_DIM
    first = tl.load(source + first_at[None, :], mask=known, other=0.0).to(tl.float32)
    second = tl.load(source + second_at[None, :], mask=known, other=0.0).to(tl.float32)
    if is_query or is_key:
        if NORM:
            if is_query:
                first, second = _normed(first, second, query_norm, first_at, second_at, inside, eps, HEAD_DIM, dtype)
            else:
                first, second = _normed(first, second, key_norm, first_at, second_at, inside, eps, HEAD_DIM, dtype)
        if PAIRS > 0:
            position = tl.load(positions + token)
            c = tl.load(cos + position * PAIRS + at, mask=at < PAIRS, other=1.0)[None, :]
            s = tl.load(sin + position * PAIRS + at, mask=at < PAIRS, other=0.0)[None, :]
            rotated = first * c - second * s
            second = second * c + first * s
            first = rotated
    if is_query:
        target = q_out + token * NUM_HEADS * HEAD_DIM + within[:, None] * HEAD_DIM
        tl.store(target + first_at[None, :], first.to(dtype), mask=known)
        tl.store(target + second_at[None, :], second.to(dtype), mask=known)
    elif slot >= 0:
        if KEEP and is_key:
            tl.store(source + first_at[None, :], first.to(dtype), mask=known)
            tl.store(source + second_at[None, :], second.to(dtype), mask=known)
        place = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * (NUM_KV_HEADS * HEAD_DIM)
        place = place + within[:, None] * HEAD_DIM
        first_place, second_place = place + first_at[None, :], place + second_at[None, :]
        stored: tl.constexpr = keys.dtype.element_ty
        if SCALED:
            # Clamped, because an 8-bit type has no numbers above its largest one, only NaN.
            scale = 1.0 / tl.where(is_key, tl.load(key_scale), tl.load(value_scale))
            first = tl.clamp(first.to(dtype).to(tl.float32) * scale, -448.0, 448.0)
            second = tl.clamp(second.to(dtype).to(tl.float32) * scale, -448.0, 448.0)
        if is_key:
            tl.store(keys + first_place, first.to(stored), mask=known)
            tl.store(keys + second_place, second.to(stored), mask=known)
        else:
            tl.store(values + first_place, first.to(stored), mask=known)
            tl.store(values + second_place, second.to(stored), mask=known)


def rotary_kv(
    qkv: Tensor,
    kv: KVLayer,
    positions: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    num_heads: int,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
    keep_keys: bool = False,
    dependent: bool = False,
) -> Tensor:
    """Returns rotated queries, and writes rotated keys, and values, to the pool.

    qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] contiguous: queries, keys, values
    positions, slots: [num_tokens] int64; a token with a negative slot is padding and not written
    cos, sin: [context_length, num_pairs] float32; elements i and i + num_pairs of a head are rotated, up to all of them
    query_norm, key_norm: [head_dim], both or neither
    keep_keys: also writes the rotated keys to `qkv`, except those of padding
    dependent: see dependent_launch
    → [num_tokens, num_heads, head_dim] in qkv's dtype
    """
    num_tokens = qkv.shape[0]
    _, block_size, num_kv_heads, head_dim = kv.keys.shape
    q = qkv.new_empty(num_tokens, num_heads, head_dim)
    groups = triton.cdiv(num_heads, HEADS_PER_PROGRAM) + 2 * triton.cdiv(num_kv_heads, HEADS_PER_PROGRAM)
    normed = query_norm is not None
    scaled = kv.key_scale is not None
    if num_tokens:
        _rotary_kv[(num_tokens, groups)](
            qkv, q, kv.keys, kv.values, positions, slots, cos, sin,
            query_norm if normed else qkv, key_norm if normed else qkv, eps,
            kv.key_scale if scaled else cos, kv.value_scale if scaled else cos, kv.block_stride,
            block_size, num_heads, num_kv_heads, head_dim, cos.shape[1], triton.next_power_of_2(head_dim // 2), normed,
            scaled, keep_keys, HEADS_PER_PROGRAM, dependent, num_warps=2, **launch_options(dependent),
        )  # fmt: skip
    return q
