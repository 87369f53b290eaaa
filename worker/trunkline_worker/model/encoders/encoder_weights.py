"""The weights of an encoder, and how they are read from a checkpoint."""

import ctypes
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trunkline_kernels.cpu.packed_linear import pack_for_many_rows
from trunkline_worker.model.checkpoint.checkpoint import Checkpoint
from trunkline_worker.model.encoders.encoder_spec import EncoderLayerSpec, EncoderSpec
from trunkline_worker.model.weight_reading import Fill, TensorReader, never_quantized
from trunkline_worker.model.weights import Linear, Weight

# Parts of checkpoints that an encoder does not compute: what was trained beside it, and numbers that are recomputed.
UNUSED = ("position_ids", "pooler.dense.weight", "pooler.dense.bias")


@dataclass(frozen=True, slots=True)
class Norm:
    """A layer norm."""

    weight: Tensor  # [hidden]
    bias: Tensor | None  # [hidden]


@dataclass(frozen=True, slots=True)
class EncoderLayerWeights:
    """The weights of an EncoderLayerSpec."""

    attention_norm: Norm | None
    qkv: Weight  # [3 * hidden, hidden]
    output: Weight  # [hidden, hidden]
    feed_forward_norm: Norm | None
    up: Weight  # [intermediate, hidden], twice as many rows if it is gated
    down: Weight  # [hidden, intermediate]


@dataclass(frozen=True, slots=True)
class EncoderWeights:
    """All weights of an encoder. Absent tables and norms are None."""

    words: Tensor  # [vocab, hidden]
    positions: Tensor | None  # [num_positions, hidden]
    types: Tensor | None  # [num_types, hidden]
    norm: Norm | None
    layers: list[EncoderLayerWeights]
    final_norm: Norm | None


def read_encoder(spec: EncoderSpec, dtype: torch.dtype, device: torch.device, checkpoint: Checkpoint) -> EncoderWeights:
    """Returns the weights of the checkpoint. Before it allocates anything, it checks the files' headers against the
    config. Raises ModelError if a check fails."""
    at = prefix_of(spec, checkpoint)
    build_encoder(spec, at, dtype, torch.device("meta"), checkpoint.check_header)
    return build_encoder(spec, at, dtype, device, checkpoint.read_into)


def pack_products(weights: EncoderWeights, kernels: ctypes.CDLL) -> None:
    """Gives the products the form in which this CPU multiplies many rows fastest, one layer after the other, so that at
    most one layer is in memory twice."""

    def packed(product: Weight) -> Weight:
        assert isinstance(product, Linear), "a checkpoint's products are not packed"
        return pack_for_many_rows(kernels, product.weight, product.bias) or product

    for index, layer in enumerate(weights.layers):
        qkv, output, up, down = map(packed, (layer.qkv, layer.output, layer.up, layer.down))
        weights.layers[index] = replace(layer, qkv=qkv, output=output, up=up, down=down)


def prefix_of(spec: EncoderSpec, checkpoint: Checkpoint) -> str:
    """Returns what precedes the names of the encoder's tensors in a checkpoint."""
    return spec.prefix if f"{spec.prefix}{spec.embedding.words}.weight" in checkpoint else ""


def build_encoder(spec: EncoderSpec, at: str, dtype: torch.dtype, device: torch.device, fill: Fill) -> EncoderWeights:
    """Returns weights that `fill` has filled, by the names of their tensors, of which all begin with `at`."""
    read = TensorReader(dtype, device, fill, never_quantized)
    hidden = spec.sizes.hidden

    def norm(name: str | None) -> Norm | None:
        if name is None:
            return None
        bias = read.tensor(f"{name}.bias", hidden) if spec.norm_bias else None
        return Norm(read.tensor(f"{name}.weight", hidden), bias)

    def table(name: str | None, rows: int) -> Tensor | None:
        return None if name is None else read.tensor(f"{at}{name}.weight", rows, hidden)

    def layer(at: str, spec: EncoderLayerSpec) -> EncoderLayerWeights:
        qkv, output, up, down = (
            read.unquantized(at, product) for product in (spec.qkv, spec.output, spec.up, spec.down)
        )
        attention_norm = None if spec.attention_norm is None else norm(f"{at}{spec.attention_norm}")
        return EncoderLayerWeights(attention_norm, qkv, output, norm(f"{at}{spec.feed_forward_norm}"), up, down)

    embedding = spec.embedding
    return EncoderWeights(
        words=read.tensor(f"{at}{embedding.words}.weight", spec.sizes.vocab_size, hidden),
        positions=table(embedding.positions, embedding.num_positions),
        types=table(embedding.types, embedding.num_types),
        norm=norm(f"{at}{embedding.norm}"),
        layers=[layer(f"{at}{spec.layers_at}{index}.", each) for index, each in enumerate(spec.layers)],
        final_norm=None if spec.final_norm is None else norm(f"{at}{spec.final_norm}"),
    )
