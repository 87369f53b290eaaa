"""The reference decoder of all architectures: embedding, layers of attention and feed-forward, final norm, logits."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from trunkline_kernels.expert_routing import route
from trunkline_kernels.experts import multiply_each
from trunkline_kernels.kv_write import write_kv
from trunkline_kernels.paged_attention import AttentionPlan, paged_attention, plan_attention
from trunkline_kernels.ragged_batch import KVLayer, RaggedBatch
from trunkline_kernels.rms_norm import rms_norm
from trunkline_kernels.rotary import apply_rotary
from trunkline_kernels.row_tiles import map_row_tiles, tile_rows
from trunkline_kernels.silu_and_mul import silu_and_mul
from trunkline_kernels.tiled_attention import tiled_attention
from trunkline_worker.model.architectures.decoder_spec import DecoderSpec
from trunkline_worker.model.expert_loads import ExpertLoads
from trunkline_worker.model.rotary_tables import layer_tables
from trunkline_worker.model.weights import (
    AttentionWeights,
    DecoderWeights,
    ExpertsWeights,
    GatedWeights,
    LayerWeights,
    StoredLinear,
    expert_of,
    parts_of,
)


class Decoder:
    """Computes hidden states of new tokens, reading and writing the KV pool, and logits of hidden states.

    tile_rows: rows of a tile of map_row_tiles(), under --deterministic; else None
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights[StoredLinear],
        *,
        context_length: int,
        deterministic: bool,
    ) -> None:
        self.spec = spec
        self._weights = weights
        self.tile_rows = tile_rows(_products(spec, weights)) if deterministic else None
        self._scale = spec.attention_scale
        self._windows = spec.windows
        self.expert_loads = ExpertLoads(spec, weights.embedding.device)  # stay 0: only the fast decoders count
        self._tables = layer_tables(spec, context_length, weights.embedding.device)

    def forward(self, token_ids: Tensor, batch: RaggedBatch, kv: list[KVLayer], *, num_padding: int = 0) -> Tensor:
        """Returns hidden states before the final norm: [num_tokens, hidden]. Writes the tokens' keys and values to
        `kv`.

        token_ids: [num_tokens] int64
        num_padding: extra rows that go through every matrix product, as in static batching; their results are dropped
        """
        count = len(token_ids)
        positions = pad(batch.positions, (0, num_padding))
        residual = self._weights.embedding[pad(token_ids, (0, num_padding))] * self.spec.multipliers.embedding
        angles: dict[Tensor, tuple[Tensor, Tensor]] = {}  # of the new tokens, by the table of cosines
        plans: dict[int | None, AttentionPlan] = {}
        layers = zip(kv, self._weights.layers, self._windows, self._tables, strict=True)
        for pool, layer, window, (cos, sin) in layers:
            if cos not in angles:
                angles[cos] = cos[positions], sin[positions]
            q, k, v = self._token_wise(
                lambda *x, w=layer.attention: self._before_attention(w, *x), residual, *angles[cos]
            )
            q, k, v = q[:count], k[:count], v[:count]
            write_kv(pool, k, v, batch.slots)
            if self.tile_rows is not None:
                attended = tiled_attention(q, pool, batch, window=window, scale=self._scale)
            else:
                if window not in plans:
                    plans[window] = plan_attention(batch, pool, window=window, dtype=q.dtype)
                attended = paged_attention(q, pool, plans[window], scale=self._scale)
            if num_padding:
                attended = pad(attended, (0, 0, 0, 0, 0, num_padding))
            (residual,) = self._token_wise(lambda *x, w=layer: self._after_attention(w, *x), attended, residual)
        return residual[:count]

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns logits [num_rows, vocab] float32. hidden: [num_rows, hidden] as forward() returns it"""
        return self._token_wise(self._head, hidden)[0]

    def final_states(self, hidden: Tensor) -> Tensor:
        """Returns hidden states after the final norm. hidden: [num_rows, hidden] as forward() returns it"""
        return self._token_wise(lambda x: (self._norm(x, self._weights.final_norm),), hidden)[0]

    def _token_wise(self, function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
        return function(*inputs) if self.tile_rows is None else map_row_tiles(function, self.tile_rows, *inputs)

    def _before_attention(
        self, w: AttentionWeights[StoredLinear], residual: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[n, hidden] → q [n, num_heads, head_dim], k and v [n, num_kv_heads, head_dim]"""
        spec = self.spec
        heads = w.qkv.multiply(self._norm(residual, w.norm)).view(len(residual), -1, spec.head_dim)
        q, k, v = torch.split(heads, [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        q, k = self._norm_heads(q, w.query_norm), self._norm_heads(k, w.key_norm)
        return apply_rotary(q, cos, sin), apply_rotary(k, cos, sin), v

    def _after_attention(self, w: LayerWeights[StoredLinear], attended: Tensor, residual: Tensor) -> tuple[Tensor]:
        """[n, num_heads, head_dim], [n, hidden] → the residual stream after the layer [n, hidden]"""
        attention, feed_forward = w.attention, w.feed_forward
        residual = residual + self._scaled(attention.output.multiply(attended.flatten(1)), attention.post_norm)
        fed = self._fed_forward(feed_forward, self._norm(residual, feed_forward.norm))
        return (residual + self._scaled(fed, feed_forward.post_norm),)

    def _fed_forward(self, w: GatedWeights[StoredLinear] | ExpertsWeights[StoredLinear], x: Tensor) -> Tensor:
        """[n, hidden] → [n, hidden]"""
        if isinstance(w, GatedWeights):
            return w.down.multiply(silu_and_mul(w.gate_up.multiply(x)))
        fed = self._experts(w, x)
        if w.shared is not None:
            shared = self._fed_forward(w.shared, x)
            fed = fed + (shared if w.shared_gate is None else shared * w.shared_gate.multiply(x).sigmoid())
        return fed

    def _experts(self, w: ExpertsWeights[StoredLinear], x: Tensor) -> Tensor:
        """[n, hidden] → [n, hidden], without a shared expert"""

        def multiply(expert: int, rows: Tensor) -> Tensor:
            gate_up, down = (expert_of(product, expert, w.rule) for product in (w.gate_up, w.down))
            return self._token_wise(lambda tile: (down.multiply(silu_and_mul(gate_up.multiply(tile))),), rows)[0]

        return multiply_each(x, route(w.router.multiply(x).float(), w.rule), multiply)

    def _scaled(self, x: Tensor, post_norm: Tensor | None) -> Tensor:
        """Returns what is added to the residual stream for the result of a layer's part."""
        return self._norm(x, post_norm) * self.spec.multipliers.residual

    def _head(self, hidden: Tensor) -> tuple[Tensor]:
        return (self._weights.head.multiply(self._norm(hidden, self._weights.final_norm)).float(),)

    def _norm_heads(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Normalises each head or all of them together, whichever the weight is for. x: [n, heads, head_dim]"""
        return x if weight is None else self._norm(x.reshape(len(x), -1, len(weight)), weight).view_as(x)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Normalises x; if there is no such norm, returns it."""
        return x if weight is None else rms_norm(x, weight, self.spec.rms_norm_eps)


def _products(spec: DecoderSpec, weights: DecoderWeights[StoredLinear]) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yields the weight and bias of every matrix product, once for layers and experts that are alike."""
    alike = dict(zip(spec.layers[::-1], weights.layers[::-1], strict=True))  # the first of each
    for product in (*(each for layer in alike.values() for each in _different(layer)), weights.head):
        for part in parts_of(product):
            yield part.matrix(weights.embedding.dtype), part.bias


def _different(layer: LayerWeights[StoredLinear]) -> Iterator[StoredLinear]:
    """Yields the products of a layer, of its experts those of the first one."""
    w = layer.feed_forward
    if isinstance(w, GatedWeights):
        yield from layer.products
        return
    qkv, output, gate_up, down, *of_shared = layer.products
    yield from (qkv, output, w.router, expert_of(gate_up, 0, w.rule), expert_of(down, 0, w.rule), *of_shared)
    if w.shared_gate is not None:
        yield w.shared_gate
