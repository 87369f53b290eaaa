"""The reference decoder of all architectures: embedding, layers of attention and feed-forward, final norm, logits."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from trunkline_kernels.kv_write import write_kv
from trunkline_kernels.paged_attention import AttentionPlan, paged_attention, plan_attention
from trunkline_kernels.ragged_batch import KVLayer, RaggedBatch
from trunkline_kernels.rms_norm import add_rms_norm, rms_norm
from trunkline_kernels.rotary import apply_rotary
from trunkline_kernels.row_tiles import map_row_tiles, tile_rows
from trunkline_kernels.silu_and_mul import silu_and_mul
from trunkline_kernels.tiled_attention import tiled_attention
from trunkline_worker.model.checkpoint.spec import DecoderSpec
from trunkline_worker.model.rotary_tables import rotary_tables


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one layer. Matrices are [out, in]; absent biases and norms are None."""

    input_norm: Tensor  # [hidden]
    qkv: Tensor  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden]: queries, keys, values
    qkv_bias: Tensor | None
    query_norm: Tensor | None  # [head_dim]
    key_norm: Tensor | None  # [head_dim]
    output: Tensor  # [hidden, num_heads * head_dim]
    output_bias: Tensor | None
    post_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden]: gate, up
    gate_up_bias: Tensor | None
    down: Tensor  # [hidden, intermediate]
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All tensors of a model."""

    embedding: Tensor  # [vocab, hidden]
    layers: list[LayerWeights]
    final_norm: Tensor  # [hidden]
    head: Tensor  # [vocab, hidden]; the embedding itself if the two are tied


def _products(weights: DecoderWeights) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yields the weight and bias of every matrix product, once for each shape: those of all layers are alike."""
    layer = weights.layers[0]
    yield layer.qkv, layer.qkv_bias
    yield layer.output, layer.output_bias
    yield layer.gate_up, layer.gate_up_bias
    yield layer.down, layer.down_bias
    yield weights.head, None


class Decoder:
    """Computes hidden states of new tokens, reading and writing the KV pool, and logits of hidden states.

    tile_rows: rows of a tile of map_row_tiles(), under --deterministic; else None
    """

    def __init__(self, spec: DecoderSpec, weights: DecoderWeights, *, context_length: int, deterministic: bool) -> None:
        self.spec = spec
        self._weights = weights
        self.tile_rows = tile_rows(_products(weights)) if deterministic else None
        self._scale = 1 / math.sqrt(spec.head_dim)
        cos, sin = rotary_tables(spec.rope, spec.head_dim, context_length)
        self._cos, self._sin = cos.to(weights.embedding.device), sin.to(weights.embedding.device)

    def forward(self, token_ids: Tensor, batch: RaggedBatch, kv: list[KVLayer], *, num_padding: int = 0) -> Tensor:
        """Returns hidden states before the final norm: [num_tokens, hidden]. Writes the tokens' keys and values to
        `kv`.

        token_ids: [num_tokens] int64
        num_padding: extra rows that go through every matrix product, as in static batching; their results are dropped
        """
        count = len(token_ids)
        positions = pad(batch.positions, (0, num_padding))
        residual = self._weights.embedding[pad(token_ids, (0, num_padding))]
        cos, sin = self._cos[positions], self._sin[positions]
        plans: dict[int | None, AttentionPlan] = {}
        for layer, weights, window in zip(kv, self._weights.layers, self.spec.windows, strict=True):
            q, k, v = self._token_wise(lambda *x, w=weights: self._before_attention(w, *x), residual, cos, sin)
            q, k, v = q[:count], k[:count], v[:count]
            write_kv(layer, k, v, batch.slots)
            if self.tile_rows is not None:
                attended = tiled_attention(q, layer, batch, window=window, scale=self._scale)
            else:
                if window not in plans:
                    plans[window] = plan_attention(
                        batch, window=window, zero_slot=layer.zero_slot, dtype=q.dtype, device=q.device
                    )
                attended = paged_attention(q, layer, plans[window], scale=self._scale)
            if num_padding:
                attended = pad(attended, (0, 0, 0, 0, 0, num_padding))
            (residual,) = self._token_wise(lambda *x, w=weights: self._after_attention(w, *x), attended, residual)
        return residual[:count]

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns logits [num_rows, vocab] float32. hidden: [num_rows, hidden] as forward() returns it"""
        return self._token_wise(self._head, hidden)[0]

    def _token_wise(self, function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
        return function(*inputs) if self.tile_rows is None else map_row_tiles(function, self.tile_rows, *inputs)

    def _before_attention(
        self, w: LayerWeights, residual: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[n, hidden] → q [n, num_heads, head_dim], k and v [n, num_kv_heads, head_dim]"""
        spec = self.spec
        x = rms_norm(residual, w.input_norm, spec.rms_norm_eps)
        heads = linear(x, w.qkv, w.qkv_bias).view(len(x), -1, spec.head_dim)
        q, k, v = torch.split(heads, [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        if w.query_norm is not None and w.key_norm is not None:
            q, k = rms_norm(q, w.query_norm, spec.rms_norm_eps), rms_norm(k, w.key_norm, spec.rms_norm_eps)
        return apply_rotary(q, cos, sin), apply_rotary(k, cos, sin), v

    def _after_attention(self, w: LayerWeights, attended: Tensor, residual: Tensor) -> tuple[Tensor]:
        """[n, num_heads, head_dim], [n, hidden] → the residual stream after the layer [n, hidden]"""
        projected = linear(attended.flatten(1), w.output, w.output_bias)
        x, residual = add_rms_norm(projected, residual, w.post_norm, self.spec.rms_norm_eps)
        x = silu_and_mul(linear(x, w.gate_up, w.gate_up_bias))
        return (residual + linear(x, w.down, w.down_bias),)

    def _head(self, hidden: Tensor) -> tuple[Tensor]:
        x = rms_norm(hidden, self._weights.final_norm, self.spec.rms_norm_eps)
        return (linear(x, self._weights.head).float(),)
