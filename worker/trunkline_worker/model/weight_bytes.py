"""How much memory a model's weights take, as they are kept: quantised, if they are."""

from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

from torch import Tensor

from trunkline_worker.model.weights import DecoderWeights


class WeightBytes(NamedTuple):
    """Bytes that a step reads of the weights."""

    layers: int
    head: int  # with the final norm; only read for logits


def weight_bytes(weights: DecoderWeights[Any]) -> WeightBytes:
    """The bytes of a model's weights, without the embedding, of which a step reads few rows."""
    return WeightBytes(sum(map(_bytes, weights.layers)), _bytes(weights.head) + _bytes(weights.final_norm))


def _bytes(part: object) -> int:
    """Bytes of a tensor, or of all tensors in a dataclass and those within it."""
    if isinstance(part, Tensor):
        return part.nbytes
    if is_dataclass(part):
        return sum(_bytes(getattr(part, field.name)) for field in fields(part))
    return 0
