"""Weights as integers with scales and zero points, each for a row or for a group of a row's inner elements."""

import torch
from torch import Tensor

from trunkline_kernels.quantized_weight import QuantizedWeight, packed_int4
from trunkline_worker.model.quantized.stored_part import spread

WORD_BITS = 32
SIGN = 0x80
INT8_GROUPS = 8  # the sizes of groups of 8 bits that the kernels take are multiples of it


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Returns the integers of 4 or 8 bits in words of 32, the first of a word in its lowest bits.

    [rows, num_words] int32 → [rows, num_words * 32 / bits] uint8
    """
    stored = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return stored if bits == 8 else torch.stack([stored & 15, stored >> 4], dim=-1).flatten(1)


def unsigned(values: Tensor) -> Tensor:
    """Returns int8 values plus 128, as uint8."""
    return values.view(torch.uint8) ^ SIGN


def num_words(count: int, bits: int) -> int:
    """Returns how many words of 32 bits hold so many integers."""
    return -(-count * bits // WORD_BITS)


def integer_weight(
    values: Tensor, scale: Tensor, zero: Tensor | None, *, bits: int, group: int
) -> QuantizedWeight | Tensor:
    """Returns the weight (value - zero) * scale, or its values if no kernel takes its sizes.

    values: uint8 [rows, inner], of 4 or 8 bits; scale: [rows, num_groups]; zero: uint8, the same; None: 8 or 128
    everywhere; group: inner elements of a group; the last group may have fewer
    """
    rows, inner = values.shape
    scale = scale.float().contiguous()
    if bits == 4 and group * scale.shape[1] == inner:
        try:
            return packed_int4(values, scale, None if zero is None else zero.contiguous())
        except ValueError:
            pass  # sizes that the kernels do not take
    if bits == 8 and zero is None and scale.shape[1] == 1:
        return QuantizedWeight("int8", (values ^ SIGN).view(torch.int8), scale[:, 0].contiguous(), inner)
    if bits == 8 and zero is None and group * scale.shape[1] == inner and group % INT8_GROUPS == 0:
        return QuantizedWeight("int8", (values ^ SIGN).view(torch.int8), scale, inner, group)
    middle = 1 << (bits - 1)
    centred = values.float() - (middle if zero is None else spread(zero.float(), (1, group), rows, inner))
    return centred * spread(scale, (1, group), rows, inner)
