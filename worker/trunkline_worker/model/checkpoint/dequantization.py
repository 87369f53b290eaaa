"""What the blocks of GGUF's formats say: stored values, scales and offsets. What the bytes are: ggml-quants.c of
llama.cpp.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from trunkline_kernels.quantized_weight import HALF, ZERO, QuantizedWeight, packed_int4
from trunkline_worker.model.checkpoint.gguf_file import Format

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
PIECE_BYTES = 4 << 20  # of stored rows: what a piece becomes on the way takes about 20 times as much


class Blocks(NamedTuple):
    """What blocks store. Groups of values share a scale and an offset."""

    values: Tensor  # [num_blocks, values of a block]: int8, or uint8 of four bits, as in QuantizedWeight
    scale: Tensor  # float32 [num_blocks, groups of a block]
    offset: Tensor | None = None  # of four bits: the same; None: ZERO is subtracted from the values

    def dequantized(self) -> Tensor:
        """[num_blocks, values of a block], float32"""
        values = self.values.float().view(*self.scale.shape, -1)
        if self.values.dtype is torch.uint8 and self.offset is None:
            values -= ZERO
        values *= self.scale[..., None]
        if self.offset is not None:
            values += self.offset[..., None]
        return values.flatten(1)


def values_of(rows: Tensor, form: Format) -> Tensor:
    """Returns the values of stored rows, in their own dtype if they are not quantised, else as float32.

    rows: [num_rows, bytes of a row], uint8
    """
    if form.name in PLAIN:
        return rows.view(PLAIN[form.name])
    num_rows, row_bytes = rows.shape
    out = torch.empty(num_rows, row_bytes // form.num_bytes * form.values)
    start = 0
    for blocks in _pieces(rows, form):
        values = blocks.dequantized().view(-1, out.shape[1])
        out[start : start + len(values)] = values
        start += len(values)
    return out


def quantized(rows: Tensor, form: Format) -> QuantizedWeight | None:
    """Returns stored rows as a weight, or None if it cannot be kept in this form. On the meta device, only shapes are
    made.

    rows: [num_rows, bytes of a row], uint8
    """
    num_rows, row_bytes = rows.shape
    inner = row_bytes // form.num_bytes * form.values
    if form.name in PLAIN or (form.name in FOUR_BITS and inner % (2 * HALF)):
        return None
    pieces = list(_pieces(rows, form))
    values = torch.cat([piece.values for piece in pieces]).view(num_rows, -1)
    scale = torch.cat([piece.scale for piece in pieces]).view(num_rows, -1)
    if form.name not in FOUR_BITS:
        return QuantizedWeight("int8", values, scale, inner, inner // scale.shape[1])
    offsets = [piece.offset for piece in pieces if piece.offset is not None]
    return packed_int4(values, scale, offset=torch.cat(offsets).view(num_rows, -1) if offsets else None)


def _pieces(rows: Tensor, form: Format) -> Iterator[Blocks]:
    """Yields some rows at a time."""
    step = max(1, PIECE_BYTES // max(1, rows.shape[1]))
    for start in range(0, len(rows), step):
        yield BLOCKS[form.name](rows[start : start + step].reshape(-1, form.num_bytes))


def _half(two_bytes: Tensor) -> Tensor:
    """[num_blocks, 2] → [num_blocks, 1]"""
    return two_bytes.contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """The low halves of the bytes of the last axis, then the high ones."""
    return torch.cat([packed & 15, packed >> 4], -1)


def _q4_0(blocks: Tensor) -> Blocks:
    return Blocks(_nibbles(blocks[:, 2:]), _half(blocks[:, :2]))


def _q4_1(blocks: Tensor) -> Blocks:
    return Blocks(_nibbles(blocks[:, 4:]), _half(blocks[:, :2]), _half(blocks[:, 2:4]))


def _q8_0(blocks: Tensor) -> Blocks:
    return Blocks(blocks[:, 2:].view(torch.int8), _half(blocks[:, :2]))


def _q4_k(blocks: Tensor) -> Blocks:
    """8 groups of 32 values, each with a scale and a minimum of 6 bits."""
    scale, least = _half(blocks[:, :2]), _half(blocks[:, 2:4])
    low_scales, low_minima, high = torch.split(blocks[:, 4:16], 4, -1)
    # The first 4 groups have theirs in the lower 6 bits; of the others' bits, 4 are in `high` and 2 are above those.
    scales = torch.cat([low_scales & 63, (high & 15) | (low_scales >> 6 << 4)], -1)
    minima = torch.cat([low_minima & 63, (high >> 4) | (low_minima >> 6 << 4)], -1)
    values = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).view(-1, 256)
    return Blocks(values, scale * scales.float(), -(least * minima.float()))


def _q6_k(blocks: Tensor) -> Blocks:
    """16 groups of 16 values of 6 bits, each with a scale of 8 bits."""
    scales = _half(blocks[:, 208:]) * blocks[:, 192:208].view(torch.int8).float()
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 256)
    two_bits = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> torch.tensor([[0], [2], [4], [6]]).to(blocks)
    values = (low | (two_bits.reshape(-1, 256) & 3) << 4).to(torch.int8) - 32
    return Blocks(values, scales)


BLOCKS: dict[str, Callable[[Tensor], Blocks]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
FOUR_BITS = {"Q4_0", "Q4_1", "Q4_K"}
