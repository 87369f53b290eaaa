"""How compressed-tensors stores integers. Source: the package of that name, version 0.20."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from trunkline_kernels.quantized_weight import QuantizedWeight
from trunkline_worker.model.quantized.integers import integer_weight, num_words, unpacked, unsigned
from trunkline_worker.model.quantized.stored_part import FLOATS, StoredPart

OF_ACTIVATIONS = ("input_scale", "input_zero_point", "output_scale", "output_zero_point")


@dataclass(frozen=True, slots=True)
class IntScheme:
    """Values of at most 8 bits, each in a byte.

    strategy: what has a scale: the "tensor", each "channel", which is a row, or each "group" of a row
    """

    strategy: str
    group: int  # only of the strategy "group"
    symmetric: bool
    main: str = "weight"

    def read(self, part: StoredPart) -> QuantizedWeight | Tensor:
        part.skip(OF_ACTIVATIONS)
        values = part.tensor(self.main, [part.rows, part.inner], dtypes=["I8"])
        group, shapes = _groups(part, self.strategy, self.group)
        scale = _of_groups(part, "weight_scale", shapes, FLOATS)
        zero = None if self.symmetric else unsigned(_of_groups(part, "weight_zero_point", shapes, ["I8"]))
        return integer_weight(unsigned(values), scale, zero, bits=8, group=group)


@dataclass(frozen=True, slots=True)
class PackedScheme:
    """Values of 4 or 8 bits plus 8 or 128, in words of 32 bits. Zero points are packed along the rows."""

    bits: int
    strategy: str
    group: int
    symmetric: bool
    main: str = "weight_packed"

    def read(self, part: StoredPart) -> QuantizedWeight | Tensor:
        part.skip(OF_ACTIVATIONS)
        rows, inner, bits = part.rows, part.inner, self.bits
        words = part.tensor(self.main, [rows, num_words(inner, bits)], dtypes=["I32"])
        shape = part.tensor("weight_shape", [2], dtypes=["I64", "I32"])
        if not shape.is_meta and shape.tolist() != [rows, inner]:
            raise part.refused("weight_shape", f"says {shape.tolist()}, config.json says {[rows, inner]}")
        group, shapes = _groups(part, self.strategy, self.group)
        scale = _of_groups(part, "weight_scale", shapes, FLOATS)
        zero = None
        if not self.symmetric:
            packed = part.tensor("weight_zero_point", [num_words(rows, bits), scale.shape[1]], dtypes=["I32"])
            zero = unpacked(packed.t(), bits)[:, :rows].t()
        return integer_weight(unpacked(words, bits)[:, :inner], scale, zero, bits=bits, group=group)


def _groups(part: StoredPart, strategy: str, group: int) -> tuple[int, list[list[int]]]:
    """Returns the inner elements that share a scale, and the shapes that the scales may have."""
    if strategy == "group":
        return group, [[part.rows, -(-part.inner // group)]]
    return part.inner, [[], [1]] if strategy == "tensor" else [[part.rows, 1], [part.rows]]


def _of_groups(part: StoredPart, own_name: str, shapes: list[list[int]], dtypes: Sequence[str]) -> Tensor:
    """Returns what each group has: [rows, num_groups]."""
    stored = part.tensor(own_name, *shapes, dtypes=dtypes)
    columns = stored if stored.ndim == 2 else stored.reshape(-1, 1)
    return columns.expand(part.rows, columns.shape[1]).contiguous()
