"""The decoder on a CPU: packed matrix products, and C kernels for everything between them.

It computes the same function as decoder.Decoder, which is its reference. decoder.Decoder is used where these kernels do
not apply: in float16, with very large heads or rows, and where there is no C compiler.

Except in oneDNN's products, a row's result depends neither on the other rows nor on how its prompt was cut into steps.
They are left to it on CPUs with AMX alone, and not under --deterministic.
"""

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trunkline_kernels.cpu.library import library
from trunkline_kernels.cpu.packed_experts import PackedExperts
from trunkline_kernels.cpu.packed_layers import LayerSizes, PackedLayer, PackedLayers
from trunkline_kernels.cpu.packed_linear import QUANTIZED_BITS, PackedLinear, pack_for_any_rows
from trunkline_kernels.ragged_batch import KVLayer, PagedBatch
from trunkline_kernels.token_masks import RowMasks
from trunkline_worker.model.architectures.decoder_spec import DecoderSpec
from trunkline_worker.model.checkpoint.refusals import ModelError
from trunkline_worker.model.expert_loads import ExpertLoads
from trunkline_worker.model.rotary_tables import layer_tables
from trunkline_worker.model.weights import (
    AttentionWeights,
    DecoderWeights,
    ExpertsWeights,
    GatedWeights,
    QuantizedLinear,
    SplitLinear,
    StoredLinear,
    StoredPart,
    Weight,
    expert_of,
    quantized_kinds,
)

MAX_HEAD_DIM, MAX_GROUP = 256, 16  # with larger ones the C kernels would need much of a thread's stack
MAX_HIDDEN = 1 << 16  # values of the row that the C kernels keep on a thread's stack: a hidden state, or all queries


def cpu_decoder(
    spec: DecoderSpec,
    weights: DecoderWeights[StoredLinear],
    *,
    context_length: int,
    deterministic: bool,
) -> "CpuDecoder | None":
    """Returns the decoder for these weights, or None if the kernels do not support them. Empties weights.layers. Raises
    ModelError if TRUNKLINE_MARCH names a build that this CPU cannot run."""
    dtype = weights.embedding.dtype
    fits = spec.head_dim <= MAX_HEAD_DIM and spec.num_heads // spec.num_kv_heads <= MAX_GROUP
    fits = fits and max(spec.hidden_size, spec.num_heads * spec.head_dim) <= MAX_HIDDEN
    if weights.embedding.device.type != "cpu" or not fits:
        return None
    kinds = quantized_kinds(weights)
    try:
        kernels = library(dtype)
        found = {kind: library(dtype, bits=QUANTIZED_BITS[kind]) for kind in kinds}
    except ValueError as error:
        raise ModelError(str(error)) from None
    quantized_kernels = {kind: built for kind, built in found.items() if built is not None}
    if kernels is None or len(quantized_kernels) < len(kinds):
        return None

    pack = Packing(kernels, quantized_kernels, dtype, deterministic)
    return CpuDecoder(spec, weights, kernels, pack, context_length)


@dataclass(frozen=True, slots=True)
class CpuExperts:
    """The weights of an ExpertsSpec. Absent norms are None."""

    norm: Tensor | None
    router: Weight
    experts: PackedExperts
    loads: Tensor  # [num_experts] int64
    post_norm: Tensor | None
    shared: GatedWeights[Weight] | None
    shared_gate: Weight | None


@dataclass(frozen=True, slots=True)
class Packing:
    """Turns weights into the forms in which a CPU multiplies by them."""

    kernels: ctypes.CDLL
    quantized_kernels: Mapping[str, ctypes.CDLL]  # by the kind of weights
    dtype: torch.dtype
    deterministic: bool

    def product(self, product: StoredLinear) -> Weight:
        if isinstance(product, SplitLinear):
            return SplitLinear(tuple(map(self.product, product.parts)))
        if isinstance(product, QuantizedLinear) or self.deterministic:
            return self._packed(product)
        return pack_for_any_rows(self.kernels, product.weight, product.bias)

    def experts(self, w: ExpertsWeights[StoredLinear], loads: Tensor) -> CpuExperts:
        numbers = range(w.rule.num_experts)
        gate_up, down = (
            [self._packed(expert_of(product, number, w.rule)) for number in numbers] for product in (w.gate_up, w.down)
        )
        experts = PackedExperts(self.kernels, w.rule, gate_up, down)
        return CpuExperts(
            w.norm, self.product(w.router), experts, loads, w.post_norm,
            shared=None if w.shared is None else self.gated(w.shared),
            shared_gate=None if w.shared_gate is None else self.product(w.shared_gate),
        )  # fmt: skip

    def gated(self, w: GatedWeights[StoredLinear]) -> GatedWeights[Weight]:
        return w.with_products(self.product(w.gate_up), self.product(w.down))

    def _packed(self, product: StoredPart) -> PackedLinear:
        kernels = self.kernels
        if isinstance(product, QuantizedLinear):
            kernels = self.quantized_kernels[product.weight.kind]
        return PackedLinear(kernels, product.weight, product.bias, self.dtype)


class CpuDecoder:
    """Computes hidden states of new tokens, reading and writing the KV pool, and logits, with the C kernels."""

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights[StoredLinear],
        kernels: ctypes.CDLL,
        pack: Packing,
        context_length: int,
    ) -> None:
        self.spec = spec
        self._kernels = kernels
        self._embedding = weights.embedding
        self._final_norm = weights.final_norm
        self._head = pack.product(weights.head)
        self._layers: list[tuple[AttentionWeights[Weight], GatedWeights[Weight] | CpuExperts]] = []
        self.expert_loads = ExpertLoads(spec, self._embedding.device)
        loads = iter(self.expert_loads.counts)
        while weights.layers:  # one at a time, so that at most one layer is in memory twice
            layer = weights.layers.pop(0)
            attention, fed, loads_of_layer = layer.attention, layer.feed_forward, next(loads)
            self._layers.append(
                (
                    attention.with_products(pack.product(attention.qkv), pack.product(attention.output)),
                    pack.gated(fed) if isinstance(fed, GatedWeights) else pack.experts(fed, loads_of_layer),
                )
            )
        self._tables = layer_tables(spec, context_length, self._embedding.device)
        self._windows = spec.windows
        self._scale = spec.attention_scale
        self._at_once = self._packed_layers()

    def _packed_layers(self) -> PackedLayers | None:
        """The layers as one call; None if one of them has parts that it does not know."""
        spec = self.spec
        packed = [
            _packed_layer(attention, fed, tables, window, spec.head_dim)
            for (attention, fed), tables, window in zip(self._layers, self._tables, self._windows, strict=True)
        ]
        known = [layer for layer in packed if layer is not None]
        if len(known) < len(packed) or spec.multipliers.residual != 1:
            return None
        sizes = LayerSizes(
            spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.rms_norm_eps, self._scale
        )
        return PackedLayers(self._kernels, sizes, known)

    def forward(self, batch: PagedBatch, kv: list[KVLayer], *, num_padding: int = 0) -> Tensor:
        """Returns hidden states before the final norm: [num_tokens, hidden]. Writes the tokens' keys and values to
        `kv`.

        num_padding: extra rows that go through every matrix product, as in static batching; their results are dropped
        """
        spec, kernels, count = self.spec, self._kernels, batch.num_tokens
        num_rows, eps = count + num_padding, spec.rms_norm_eps
        heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        token_ids = torch.nn.functional.pad(batch.token_ids, (0, num_padding)) if num_padding else batch.token_ids
        residual = self._embedding.index_select(0, token_ids)
        if spec.multipliers.embedding != 1:
            residual.mul_(spec.multipliers.embedding)
        if self._at_once is not None:
            self._at_once.forward(residual, batch, kv)
            return residual[:count]
        normed = torch.empty_like(residual)
        q = residual.new_empty(num_rows, heads * dim)
        attended = residual.new_zeros(num_rows, heads * dim) if num_padding else torch.empty_like(q)
        where = (batch.tables.data_ptr(), batch.starts.data_ptr(), batch.contexts.data_ptr())
        num_seqs = len(batch.contexts)
        added: Tensor | None = None  # still to be added to the residual stream
        layers = zip(self._layers, kv, self._windows, self._tables, strict=True)
        for (attention, feed_forward), pool, window, (cos, sin) in layers:
            qkv = attention.qkv.multiply(self._add_norm(added, residual, attention.norm, normed))
            across = attention.across_heads(qkv, dim)
            for part, weight in across:
                self._add_norm(None, part, weight, part)
            query_norm, key_norm = (None, None) if across else (attention.query_norm, attention.key_norm)
            keys, values = pool.keys.data_ptr(), pool.values.data_ptr()
            kernels.rotate_and_write(
                qkv.data_ptr(), q.data_ptr(), keys, values, *where, cos.data_ptr(), sin.data_ptr(),
                _pointer(query_norm), _pointer(key_norm), pool.block_stride, num_seqs, heads,
                kv_heads, dim, cos.shape[1], batch.block_size, eps,
            )  # fmt: skip
            kernels.attention(
                q.data_ptr(), keys, values, *where, attended.data_ptr(), pool.block_stride, num_seqs, heads, kv_heads,
                dim, batch.block_size, window or 0, self._scale,
            )  # fmt: skip
            added = self._scaled(attention.output.multiply(attended), attention.post_norm)
            x = self._add_norm(added, residual, feed_forward.norm, normed)
            added = self._scaled(self._fed_forward(feed_forward, x, num_padding), feed_forward.post_norm)
        return residual.add_(added)[:count] if added is not None else residual

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns logits [num_rows, vocab] in the model's dtype. hidden: [num_rows, hidden] as forward() returns it"""
        return self._head.multiply(self.final_states(hidden))

    def final_states(self, hidden: Tensor) -> Tensor:
        """Returns hidden states after the final norm. hidden: [num_rows, hidden] as forward() returns it"""
        hidden = hidden.contiguous()
        return self._add_norm(None, hidden, self._final_norm, torch.empty_like(hidden))

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.dtype

    def multiply_only(self, num_rows: int, num_sampled: int) -> Callable[[], None]:
        """Returns a function that runs the matrix products of a step, and what lies between those of feed-forward
        parts: a benchmark's lower bound for its time."""
        spec = self.spec
        x = torch.randn(num_rows, spec.hidden_size, dtype=self.dtype)
        attended = torch.randn(num_rows, spec.num_heads * spec.head_dim, dtype=self.dtype)
        hidden = torch.randn(num_sampled, spec.hidden_size, dtype=self.dtype)

        def multiply() -> None:
            for attention, feed_forward in self._layers:
                attention.qkv.multiply(x)
                attention.output.multiply(attended)
                self._fed_forward(feed_forward, x)
            self._head.multiply(hidden)

        return multiply

    def greedy(self, logits: Tensor, masks: RowMasks | None) -> list[int]:
        """Returns the most likely token of each row that its mask allows. -1: the row is not finite; -2: its mask
        leaves nothing. logits: [num_rows, vocab]"""
        ids = torch.empty(len(logits), dtype=torch.int64)
        self._kernels.greedy(logits.data_ptr(), ids.data_ptr(), len(logits), logits.shape[1])
        if masks is not None:
            self._kernels.greedy_allowed(
                logits.data_ptr(), masks.rows.data_ptr(), masks.words.data_ptr(), ids.data_ptr(), *masks.words.shape,
                logits.shape[1],
            )  # fmt: skip
        return ids.tolist()

    def exclude(self, logits: Tensor, masks: RowMasks) -> None:
        """token_masks.exclude() for float32 logits [num_rows, vocab], contiguous."""
        self._kernels.exclude(
            logits.data_ptr(), masks.rows.data_ptr(), masks.words.data_ptr(), *masks.words.shape, logits.shape[1]
        )

    def _scaled(self, x: Tensor, post_norm: Tensor | None) -> Tensor:
        """Returns what is to be added to the residual stream for the result of a layer's part."""
        if post_norm is not None:
            x = self._add_norm(None, x, post_norm, torch.empty_like(x))
        multiplier = self.spec.multipliers.residual
        return x if multiplier == 1 else x.mul_(multiplier)

    def _fed_forward(self, w: GatedWeights[Weight] | CpuExperts, x: Tensor, num_padding: int = 0) -> Tensor:
        """[num_rows, hidden] → [num_rows, hidden]; num_padding: of the last rows, which no expert's load counts"""
        if isinstance(w, CpuExperts):
            fed = w.experts.multiply(x, w.router.multiply(x), loads=w.loads, num_padding=num_padding)
            if w.shared is not None:
                shared, gate = self._fed_forward(w.shared, x), None
                if w.shared_gate is not None:
                    gate = w.shared_gate.multiply(x)
                self._kernels.add_gated(shared.data_ptr(), _pointer(gate), fed.data_ptr(), *x.shape)
            return fed
        gate_up = w.gate_up.multiply(x)
        gated = gate_up.new_empty(len(x), gate_up.shape[1] // 2)
        self._kernels.silu_and_mul(gate_up.data_ptr(), gated.data_ptr(), *gated.shape)
        return w.down.multiply(gated)

    def _add_norm(self, added: Tensor | None, residual: Tensor, weight: Tensor | None, out: Tensor) -> Tensor:
        """Adds to the residual stream, and returns its norm, in `out`; without a norm, the residual stream itself."""
        if weight is None:
            return residual if added is None else residual.add_(added)
        rows, dim = residual.shape
        self._kernels.add_rms_norm(
            _pointer(added), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, residual.stride(0), dim,
            self.spec.rms_norm_eps,
        )  # fmt: skip
        return out


def _packed_layer(
    w: AttentionWeights[Weight],
    fed: GatedWeights[Weight] | CpuExperts,
    tables: tuple[Tensor, Tensor],
    window: int | None,
    head_dim: int,
) -> PackedLayer | None:
    """The layer for PackedLayers; None if it has other parts."""
    if not isinstance(fed, GatedWeights) or w.norm is None or fed.norm is None or w.post_norm is not None:
        return None
    if fed.post_norm is not None or any(
        norm is not None and len(norm) != head_dim for norm in (w.query_norm, w.key_norm)
    ):
        return None
    qkv, output, gate_up, down = w.qkv, w.output, fed.gate_up, fed.down
    if not isinstance(qkv, PackedLinear) or not isinstance(output, PackedLinear):
        return None
    if not isinstance(gate_up, PackedLinear) or not isinstance(down, PackedLinear):
        return None
    return PackedLayer(w.norm, w.query_norm, w.key_norm, fed.norm, qkv, output, gate_up, down, tables, window)


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
