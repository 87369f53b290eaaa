"""Computes encoders: embeddings, layers of attention and feed-forward parts, in plain PyTorch on any device, but for
attention and products, which have kernels."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, relu

from trunkline_kernels.rotary import apply_rotary
from trunkline_kernels.row_tiles import map_row_tiles, tile_rows
from trunkline_worker.model.encoders.encoder_attention import AttentionOf
from trunkline_worker.model.encoders.encoder_spec import EncoderSpec
from trunkline_worker.model.encoders.encoder_weights import EncoderLayerWeights, EncoderWeights, Norm
from trunkline_worker.model.rotary_tables import rotary_tables
from trunkline_worker.model.weights import Linear

FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "gelu_new": partial(gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(gelu, approximate="tanh"),
    "relu": relu,
}


class Encoder:
    """Computes the hidden states of whole texts, side by side without padding.

    tile_rows: rows of a tile of map_row_tiles(), under --deterministic; else None
    """

    def __init__(
        self, spec: EncoderSpec, weights: EncoderWeights, attention_of: AttentionOf, *, deterministic: bool
    ) -> None:
        self.spec = spec
        self._attention_of = attention_of
        self._weights = weights
        self.tile_rows = tile_rows(_products(weights)) if deterministic else None
        self._activation = FUNCTIONS[spec.activation]
        device = weights.words.device
        self._tables = {
            rope: tuple(table.to(device) for table in rotary_tables(rope, spec.context_length)) for rope in spec.ropes
        }

    def forward(self, token_ids: Tensor, lengths: Sequence[int], first_segments: Sequence[int]) -> Tensor:
        """Returns hidden states after the last norm: [num_tokens, hidden].

        token_ids: [num_tokens] int64, text after text; lengths: tokens of each text
        first_segments: tokens of each text whose type is 0, from its first one on; 0: all
        """
        device = token_ids.device
        positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
        types = torch.cat(
            [
                (torch.arange(length) >= (first or length)).long()
                for length, first in zip(lengths, first_segments, strict=True)
            ]
        ).to(device)
        (residual,) = self._token_wise(self._embed, token_ids, positions, types)
        angles = {rope: [table[positions] for table in tables] for rope, tables in self._tables.items()}
        attention = self._attention_of(lengths)
        for spec, layer in zip(self.spec.layers, self._weights.layers, strict=True):
            rotation = angles[spec.rope] if spec.rope is not None else []
            q, k, v = self._token_wise(partial(self._before_attention, layer), residual, *rotation)
            attended = attention(q, k, v, window=spec.window)
            (residual,) = self._token_wise(partial(self._after_attention, layer), attended, residual)
        return self._token_wise(self._finish, residual)[0]

    def _token_wise(self, function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
        return function(*inputs) if self.tile_rows is None else map_row_tiles(function, self.tile_rows, *inputs)

    def _embed(self, token_ids: Tensor, positions: Tensor, types: Tensor) -> tuple[Tensor]:
        """[n] each → [n, hidden]"""
        w = self._weights
        embedded = w.words[token_ids]
        if w.types is not None:
            embedded = embedded + w.types[types.clamp(max=len(w.types) - 1)]
        if w.positions is not None:
            embedded = embedded + w.positions[positions + self.spec.embedding.first_position]
        return (self._norm(embedded, w.norm),)

    def _before_attention(self, layer: EncoderLayerWeights, residual: Tensor, *rotation: Tensor) -> tuple[Tensor, ...]:
        """[n, hidden] → queries, keys and values [n, num_heads, head_dim]"""
        x = self._norm(residual, layer.attention_norm) if self.spec.norms_first else residual
        heads = layer.qkv.multiply(x).view(len(x), 3, self.spec.sizes.num_heads, self.spec.sizes.head_dim)
        q, k, v = heads.unbind(1)
        if rotation:
            q, k = (apply_rotary(each, *rotation) for each in (q, k))
        return q, k, v

    def _after_attention(self, layer: EncoderLayerWeights, attended: Tensor, residual: Tensor) -> tuple[Tensor]:
        """[n, num_heads, head_dim], [n, hidden] → the residual stream after the layer [n, hidden]"""
        residual = residual + layer.output.multiply(attended.flatten(1))
        if self.spec.norms_first:
            return (residual + self._fed_forward(layer, self._norm(residual, layer.feed_forward_norm)),)
        residual = self._norm(residual, layer.attention_norm)
        return (self._norm(residual + self._fed_forward(layer, residual), layer.feed_forward_norm),)

    def _fed_forward(self, layer: EncoderLayerWeights, x: Tensor) -> Tensor:
        up = layer.up.multiply(x)
        if not self.spec.is_gated:
            return layer.down.multiply(self._activation(up))
        activated, factor = up.chunk(2, dim=-1)
        return layer.down.multiply(self._activation(activated) * factor)

    def _finish(self, residual: Tensor) -> tuple[Tensor]:
        return (self._norm(residual, self._weights.final_norm),)

    def _norm(self, x: Tensor, norm: Norm | None) -> Tensor:
        """Normalises x; if there is no such norm, returns it."""
        return x if norm is None else layer_norm(x, x.shape[-1:], norm.weight, norm.bias, self.spec.norm_eps)


def _products(weights: EncoderWeights) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yields weight and bias of the first layer's products: those of the others have the same shapes."""
    layer = weights.layers[0]
    for product in (layer.qkv, layer.output, layer.up, layer.down):
        assert isinstance(product, Linear), "tiles are for products in plain PyTorch"
        yield product.weight, product.bias
