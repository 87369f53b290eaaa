"""The values of GGUF's formats, as float32. Each function takes blocks, [num_blocks, bytes of a block], and returns
[num_blocks, values of a block]. What the bytes are: ggml-quants.c of llama.cpp.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from trunkline_worker.model.checkpoint.gguf_file import Format

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
PIECE_BYTES = 4 << 20  # of stored rows: what a piece becomes on the way takes about 20 times as much


def values_of(rows: Tensor, form: Format) -> Tensor:
    """Returns the values of stored rows, in their own dtype if they are not quantised, else as float32.

    rows: [num_rows, bytes of a row], uint8
    """
    if form.name in PLAIN:
        return rows.view(PLAIN[form.name])
    num_rows, row_bytes = rows.shape
    out = torch.empty(num_rows, row_bytes // form.num_bytes * form.values)
    step = max(1, PIECE_BYTES // max(1, row_bytes))
    for start in range(0, num_rows, step):
        blocks = rows[start : start + step].reshape(-1, form.num_bytes)
        out[start : start + step] = BLOCKS[form.name](blocks).view(-1, out.shape[1])
    return out


def _half(two_bytes: Tensor) -> Tensor:
    """[num_blocks, 2] → [num_blocks, 1]"""
    return two_bytes.contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """The low halves of the bytes of the last axis, then the high ones."""
    return torch.cat([packed & 15, packed >> 4], -1)


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks[:, :2]) * (_nibbles(blocks[:, 2:]).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks[:, :2]) * _nibbles(blocks[:, 4:]).float() + _half(blocks[:, 2:4])


def _q8_0(blocks: Tensor) -> Tensor:
    return _half(blocks[:, :2]) * blocks[:, 2:].view(torch.int8).float()


def _q4_k(blocks: Tensor) -> Tensor:
    """8 groups of 32 values, each with a scale and a minimum of 6 bits."""
    scale, least = _half(blocks[:, :2]), _half(blocks[:, 2:4])
    low_scales, low_minima, high = torch.split(blocks[:, 4:16], 4, -1)
    # The first 4 groups have theirs in the lower 6 bits; of the others' bits, 4 are in `high` and 2 are above those.
    scales = torch.cat([low_scales & 63, (high & 15) | (low_scales >> 6 << 4)], -1)
    minima = torch.cat([low_minima & 63, (high >> 4) | (low_minima >> 6 << 4)], -1)
    values = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).view(-1, 8, 32).float()
    return ((scale * scales.float())[..., None] * values - (least * minima.float())[..., None]).flatten(1)


def _q6_k(blocks: Tensor) -> Tensor:
    """16 groups of 16 values of 6 bits, each with a scale of 8 bits."""
    scales = _half(blocks[:, 208:]) * blocks[:, 192:208].view(torch.int8).float()
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 256)
    two_bits = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    values = (low | (two_bits.reshape(-1, 256) & 3) << 4).float() - 32
    return (scales[..., None] * values.view(-1, 16, 16)).flatten(1)


BLOCKS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
