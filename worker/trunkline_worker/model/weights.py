"""The weights of a decoder. They have the structure of its spec."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import groupby
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import linear

from trunkline_kernels.quantized_weight import BLOCK, QuantizedWeight, columns_of, dequantize, quantize
from trunkline_kernels.routing_rule import RoutingRule
from trunkline_worker.model.checkpoint.refusals import ModelError

W = TypeVar("W")
V = TypeVar("V")
P = TypeVar("P", bound="Weight", covariant=True)


class Weight(Protocol):
    """The matrix of a product, with its bias, in the form in which a backend multiplies by it.

    Linear and QuantizedLinear are the references, PackedLinear and OneDnnLinear are those of a CPU, GpuWeight is that
    of a GPU, and SplitLinear is made of others. What is special about a weight stays behind `multiply`: that it is
    quantised or a slice, or that adapters are added to it. Decoders only say where products are.
    """

    def multiply(self, x: Tensor) -> Tensor:
        """x: [num_rows, in] → [num_rows, out] in x's dtype"""


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight as a checkpoint has it."""

    weight: Tensor  # [out, in]
    bias: Tensor | None  # [out]

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """[out, in]"""
        return self.weight.to(dtype)

    def multiply(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class QuantizedLinear:
    """A weight that is kept in quantised form only. Embedding and head are not, because they decide between tokens."""

    weight: QuantizedWeight
    bias: Tensor | None

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """[out, in]"""
        return dequantize(self.weight).to(dtype)

    def multiply(self, x: Tensor) -> Tensor:
        return linear(x, self.matrix(x.dtype), self.bias)


@dataclass(frozen=True, slots=True)
class SplitLinear(Generic[P]):
    """A product whose parts a checkpoint stores in different forms: it multiplies by each of them."""

    parts: tuple[P, ...]  # one below the other

    def multiply(self, x: Tensor) -> Tensor:
        return torch.cat([part.multiply(x) for part in self.parts], dim=1)


StoredPart = Linear | QuantizedLinear
StoredLinear = StoredPart | SplitLinear[StoredPart]


def stored_part(weight: Tensor | QuantizedWeight, bias: Tensor | None) -> StoredPart:
    return QuantizedLinear(weight, bias) if isinstance(weight, QuantizedWeight) else Linear(weight, bias)


def parts_of(product: StoredLinear) -> tuple[StoredPart, ...]:
    """Returns the parts that are held apart; the product itself if it is whole."""
    return product.parts if isinstance(product, SplitLinear) else (product,)


def whole_product(product: StoredLinear, dtype: torch.dtype) -> StoredPart:
    """Returns the product as one weight, in this dtype if its parts are held apart."""
    if not isinstance(product, SplitLinear):
        return product
    return _one_weight([Linear(part.matrix(dtype), part.bias) for part in product.parts])


def expert_of(product: StoredLinear, number: int, rule: RoutingRule) -> StoredPart:
    """Returns the product of one expert, which shares the memory of one that has those of all."""
    assert not isinstance(product, SplitLinear), "weights of experts are whole"
    count = len(product.weight.data) // rule.num_experts
    rows = slice(number * count, (number + 1) * count)
    bias = None if product.bias is None else product.bias[rows]
    if isinstance(product, QuantizedLinear):
        return replace(product, weight=columns_of(product.weight, rows), bias=bias)
    return replace(product, weight=product.weight[rows], bias=bias)


def joined(parts: Iterable[StoredPart]) -> StoredLinear:
    """Returns the product of parts one below the other. Neighbours of one form become one weight."""
    apart = tuple(_one_weight(list(alike)) for _, alike in groupby(parts, _form))
    return apart[0] if len(apart) == 1 else SplitLinear(apart)


def _form(part: StoredPart) -> tuple[object, ...]:
    """What is equal for parts that can be one weight."""
    if isinstance(part, Linear):
        return ("plain",)
    weight = part.weight
    if weight.in_blocks and len(weight.data) % BLOCK:
        return (id(weight),)  # the blocks of another one below it would begin within its last blocks
    return weight.kind, weight.group, weight.scale.shape[1:], weight.zero is None, weight.offset is None


def _one_weight(parts: Sequence[StoredPart]) -> StoredPart:
    if len(parts) == 1:
        return parts[0]
    weights = [part.weight for part in parts]
    biases = [part.bias for part in parts if part.bias is not None]
    bias = torch.cat(biases) if biases else None
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    if not quantized:
        return Linear(torch.cat([weight for weight in weights if isinstance(weight, Tensor)]), bias)
    zeros = [weight.zero for weight in quantized if weight.zero is not None]
    offsets = [weight.offset for weight in quantized if weight.offset is not None]
    whole = replace(
        quantized[0],
        data=torch.cat([weight.data for weight in quantized]),
        scale=torch.cat([weight.scale for weight in quantized]),
        zero=torch.cat(zeros) if zeros else None,
        offset=torch.cat(offsets) if offsets else None,
    )
    return QuantizedLinear(whole, bias)


def stored(product: StoredLinear, quantization: str) -> StoredLinear:
    """Returns a weight as it is kept. Raises ModelError if its shape does not allow the quantisation."""
    if quantization == "none" or not isinstance(product, Linear):
        return product
    try:
        return QuantizedLinear(quantize(product.weight, quantization), product.bias)
    except ValueError as error:
        raise ModelError(f"quantization={quantization}: {error}") from None


@dataclass(frozen=True, slots=True)
class AttentionWeights(Generic[W]):
    """The weights of an AttentionSpec. Absent norms are None."""

    norm: Tensor | None  # [hidden]
    qkv: W  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden]: queries, keys, values
    query_norm: Tensor | None  # [head_dim], or [num_heads * head_dim]: of all heads together
    key_norm: Tensor | None  # [head_dim], or [num_kv_heads * head_dim]
    output: W  # [hidden, num_heads * head_dim]
    post_norm: Tensor | None  # [hidden]

    def across_heads(self, qkv: Tensor, head_dim: int) -> tuple[tuple[Tensor, Tensor], ...]:
        """Returns the queries and the keys, each with its norm, if these are norms of all heads together; else nothing.

        qkv: [num_rows, (num_heads + 2 * num_kv_heads) * head_dim] → [num_rows, size of the norm]
        """
        norms = self.query_norm, self.key_norm
        if norms[0] is None or norms[1] is None or len(norms[0]) == head_dim:
            return ()
        queries, keys = len(norms[0]), len(norms[1])
        return (qkv[:, :queries], norms[0]), (qkv[:, queries : queries + keys], norms[1])

    def with_products(self, qkv: V, output: V) -> "AttentionWeights[V]":
        return AttentionWeights(self.norm, qkv, self.query_norm, self.key_norm, output, self.post_norm)


@dataclass(frozen=True, slots=True)
class GatedWeights(Generic[W]):
    """The weights of a GatedSpec. Absent norms are None."""

    norm: Tensor | None  # [hidden]
    gate_up: W  # [2 * intermediate, hidden]: gate, up
    down: W  # [hidden, intermediate]
    post_norm: Tensor | None  # [hidden]

    def with_products(self, gate_up: V, down: V) -> "GatedWeights[V]":
        return GatedWeights(self.norm, gate_up, down, self.post_norm)


@dataclass(frozen=True, slots=True)
class ExpertsWeights(Generic[W]):
    """The weights of an ExpertsSpec. Absent norms are None."""

    norm: Tensor | None  # [hidden]
    router: Linear  # [num_experts, hidden]
    rule: RoutingRule
    gate_up: W  # [num_experts * 2 * intermediate, hidden]: gate and up of each expert
    down: W  # [num_experts * hidden, intermediate]
    post_norm: Tensor | None  # [hidden]
    shared: GatedWeights[W] | None
    shared_gate: Linear | None  # [1, hidden]

    def with_products(self, gate_up: V, down: V, *of_shared: V) -> "ExpertsWeights[V]":
        shared = None if self.shared is None else self.shared.with_products(*of_shared)
        return ExpertsWeights(
            self.norm, self.router, self.rule, gate_up, down, self.post_norm, shared, self.shared_gate
        )


@dataclass(frozen=True, slots=True)
class LayerWeights(Generic[W]):
    """The weights of a LayerSpec."""

    attention: AttentionWeights[W]
    feed_forward: GatedWeights[W] | ExpertsWeights[W]

    @property
    def products(self) -> tuple[W, ...]:
        """In the order of LayerSpec.products."""
        fed = self.feed_forward
        shared = fed.shared if isinstance(fed, ExpertsWeights) else None
        others = () if shared is None else (shared.gate_up, shared.down)
        return self.attention.qkv, self.attention.output, fed.gate_up, fed.down, *others

    def with_products(self, products: Iterable[V]) -> "LayerWeights[V]":
        """Returns the layer with the same norms and other forms of its products, in the order of LayerSpec.products."""
        qkv, output, *others = products
        return LayerWeights(self.attention.with_products(qkv, output), self.feed_forward.with_products(*others))


@dataclass(frozen=True, slots=True)
class DecoderWeights(Generic[W]):
    """All weights of a model."""

    embedding: Tensor  # [vocab, hidden]
    layers: list[LayerWeights[W]]
    final_norm: Tensor  # [hidden]
    head: Linear  # [vocab, hidden]; the embedding itself if the two are tied


def quantized_kinds(weights: DecoderWeights[StoredLinear]) -> frozenset[str]:
    """Returns the kinds of the quantised weights among a model's products."""
    parts = [part for layer in weights.layers for product in layer.products for part in parts_of(product)]
    return frozenset(part.weight.kind for part in parts if isinstance(part, QuantizedLinear))


class WeightBytes(NamedTuple):
    """Bytes that a step reads of the weights."""

    layers: int  # without experts
    head: int  # with the final norm; only read for logits
    experts: int  # of all layers; only those that a token chose are read


def weight_bytes(weights: DecoderWeights[Any]) -> WeightBytes:
    """The bytes of a model's weights, without the embedding, of which a step reads few rows."""
    parts = [layer.feed_forward for layer in weights.layers]
    experts = sum(_bytes((part.gate_up, part.down)) for part in parts if isinstance(part, ExpertsWeights))
    layers = sum(map(_bytes, weights.layers)) - experts
    return WeightBytes(layers, _bytes(weights.head) + _bytes(weights.final_norm), experts)


def _bytes(part: object) -> int:
    """Bytes of a tensor, or of all tensors in a tuple or a dataclass and those within it."""
    if isinstance(part, Tensor):
        return part.nbytes
    if isinstance(part, tuple):
        return sum(map(_bytes, part))
    if is_dataclass(part):
        return sum(_bytes(getattr(part, field.name)) for field in fields(part))
    return 0
