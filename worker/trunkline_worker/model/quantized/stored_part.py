"""The stored tensors of one part of a product, such as q_proj."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trunkline_kernels.quantized_weight import QuantizedWeight
from trunkline_worker.model.checkpoint.checkpoint import STORED_DTYPES, Checkpoint
from trunkline_worker.model.checkpoint.refusals import ModelError

FLOATS = tuple(STORED_DTYPES)
BYTES_OF_EXPONENTS = ("F8_E8M0", "U8")  # two names of one format


@dataclass(frozen=True, slots=True)
class StoredPart:
    """Reads the tensors of a part whose weight is [rows, inner]; on the meta device, their headers.

    name: of the part, without the names of its tensors
    """

    checkpoint: Checkpoint
    name: str
    rows: int
    inner: int
    device: torch.device

    def tensor(self, own_name: str, *shapes: Sequence[int], dtypes: Sequence[str]) -> Tensor:
        """Returns a tensor as it is stored. Raises ModelError if it is missing, or has none of the shapes and dtypes.

        dtypes: by safetensors' names
        """
        return self.checkpoint.tensor(f"{self.name}.{own_name}", list(map(list, shapes)), dtypes, self.device)

    def has(self, own_name: str) -> bool:
        return f"{self.name}.{own_name}" in self.checkpoint

    def skip(self, own_names: Iterable[str]) -> None:
        """Counts tensors that have no effect here, and may be missing, as read."""
        for own_name in own_names:
            self.checkpoint.skip(f"{self.name}.{own_name}")

    def skip_zeros(self, own_name: str) -> None:
        """Counts a tensor, which may be missing, as read if all its values are zero."""
        self.checkpoint.skip_zeros(f"{self.name}.{own_name}")

    def refused(self, own_name: str, why: str) -> ModelError:
        return self.checkpoint.refused(f"{self.name}.{own_name}", why)


class Scheme(Protocol):
    """How a part is stored."""

    @property
    def main(self) -> str:
        """The name of the tensor that holds the values."""

    def read(self, part: StoredPart) -> QuantizedWeight | Tensor:
        """Returns the weight, or its values as float32 if no QuantizedWeight can hold them: [rows, inner]."""


@dataclass(frozen=True, slots=True)
class StoredSchemes:
    """How each part of a model's products is stored.

    quantizes_activations, quantizes_kv: what the checkpoint was made for, too
    """

    method: str
    scheme_of: Callable[[str], Scheme | None]  # of a part's name; None: not quantised
    quantizes_activations: bool = False
    quantizes_kv: bool = False


def spread(of_blocks: Tensor, block: tuple[int, int], rows: int, inner: int) -> Tensor:
    """Repeats the values of blocks: [ceil(rows / block[0]), ceil(inner / block[1])] → [rows, inner]."""
    high, wide = min(block[0], rows), min(block[1], inner)  # config.json may name blocks far larger than the weight
    return of_blocks.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :inner]


def powers_of_two(exponents: Tensor) -> Tensor:
    """Returns what biased exponents of 8 bits stand for, as float32."""
    return torch.exp2(exponents.view(torch.uint8).float() - 127)
