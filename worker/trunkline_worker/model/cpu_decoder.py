"""The decoder on a CPU: packed matrix products, and C kernels for everything between them.

It computes the same function as decoder.Decoder, which is its reference. decoder.Decoder is used where these kernels do
not apply: in float16, with very large heads or rows, and where there is no C compiler.

Except in oneDNN's products, a row's result depends neither on the other rows nor on how its prompt was cut into steps.
So --deterministic uses the packed products everywhere.
"""

import ctypes
import math
from collections.abc import Callable

import torch
from torch import Tensor

from trunkline_kernels.cpu.library import library
from trunkline_kernels.cpu.packed_linear import QUANTIZED_BITS, PackedLinear, pack_linear
from trunkline_kernels.ragged_batch import KVLayer, PagedBatch
from trunkline_kernels.token_masks import RowMasks
from trunkline_worker.model.architectures.decoder_spec import DecoderSpec, ExpertsSpec
from trunkline_worker.model.checkpoint.refusals import ModelError
from trunkline_worker.model.rotary_tables import layer_tables
from trunkline_worker.model.weights import (
    DecoderWeights,
    LayerWeights,
    QuantizedLinear,
    SplitLinear,
    StoredLinear,
    Weight,
    quantized_kinds,
)

MAX_HEAD_DIM, MAX_GROUP = 256, 16  # sizes of the C kernels' buffers
MAX_HIDDEN = 1 << 16  # values of the row that the C kernels keep on a thread's stack

Pack = Callable[[StoredLinear], Weight]


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
    fits = fits and spec.hidden_size <= MAX_HIDDEN
    fits = fits and not any(isinstance(layer.feed_forward, ExpertsSpec) for layer in spec.layers)
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

    def pack(product: StoredLinear) -> Weight:
        if isinstance(product, SplitLinear):
            return SplitLinear(tuple(map(pack, product.parts)))
        if isinstance(product, QuantizedLinear):
            return PackedLinear(quantized_kernels[product.weight.kind], product.weight, product.bias, dtype)
        if deterministic:
            return PackedLinear(kernels, product.weight, product.bias, dtype)
        return pack_linear(kernels, product.weight, product.bias)

    return CpuDecoder(spec, weights, kernels, pack, context_length)


class CpuDecoder:
    """Computes hidden states of new tokens, reading and writing the KV pool, and logits, with the C kernels."""

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights[StoredLinear],
        kernels: ctypes.CDLL,
        pack: Pack,
        context_length: int,
    ) -> None:
        self.spec = spec
        self._kernels = kernels
        self._embedding = weights.embedding
        self._final_norm = weights.final_norm
        self._head = pack(weights.head)
        self._layers: list[LayerWeights[Weight]] = []
        while weights.layers:  # one at a time, so that at most one layer is in memory twice
            layer = weights.layers.pop(0)
            self._layers.append(layer.with_products(map(pack, layer.products)))
        self._tables = layer_tables(spec, context_length, self._embedding.device)
        self._windows = spec.windows
        self._intermediate = spec.intermediate_size
        self._scale = 1 / math.sqrt(spec.head_dim)

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
        normed = torch.empty_like(residual)
        q = residual.new_empty(num_rows, heads * dim)
        attended = residual.new_zeros(num_rows, heads * dim) if num_padding else torch.empty_like(q)
        gated = residual.new_empty(num_rows, self._intermediate)
        where = (batch.tables.data_ptr(), batch.starts.data_ptr(), batch.contexts.data_ptr())
        num_seqs = len(batch.contexts)
        added: Tensor | None = None  # still to be added to the residual stream
        layers = zip(self._layers, kv, self._windows, self._tables, strict=True)
        for layer, pool, window, (cos, sin) in layers:
            attention, feed_forward = layer.attention, layer.feed_forward
            qkv = attention.qkv.multiply(self._add_norm(added, residual, attention.norm, normed))
            keys, values = pool.keys.data_ptr(), pool.values.data_ptr()
            kernels.rotate_and_write(
                qkv.data_ptr(), q.data_ptr(), keys, values, *where, cos.data_ptr(), sin.data_ptr(),
                _pointer(attention.query_norm), _pointer(attention.key_norm), pool.block_stride, num_seqs, heads,
                kv_heads, dim, batch.block_size, eps,
            )  # fmt: skip
            kernels.attention(
                q.data_ptr(), keys, values, *where, attended.data_ptr(), pool.block_stride, num_seqs, heads, kv_heads,
                dim, batch.block_size, window or 0, self._scale,
            )  # fmt: skip
            added = attention.output.multiply(attended)
            if attention.post_norm is not None:
                added = self._add_norm(None, added, attention.post_norm, torch.empty_like(added))
            x = self._add_norm(added, residual, feed_forward.norm, normed)
            gate_up = feed_forward.gate_up.multiply(x)  # its memory must live until the kernel has finished
            kernels.silu_and_mul(gate_up.data_ptr(), gated.data_ptr(), num_rows, self._intermediate)
            added = feed_forward.down.multiply(gated)
            if feed_forward.post_norm is not None:
                added = self._add_norm(None, added, feed_forward.post_norm, torch.empty_like(added))
        return residual.add_(added)[:count] if added is not None else residual

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns logits [num_rows, vocab] in the model's dtype. hidden: [num_rows, hidden] as forward() returns it"""
        hidden = hidden.contiguous()
        x = self._add_norm(None, hidden, self._final_norm, torch.empty_like(hidden))
        return self._head.multiply(x)

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.dtype

    def multiply_only(self, num_rows: int, num_sampled: int) -> Callable[[], None]:
        """Returns a function that runs only the matrix products of a step: a benchmark's lower bound for its time."""
        inputs = [torch.randn(num_rows, product.inner, dtype=self.dtype) for product in self.spec.layers[0].products]
        hidden = torch.randn(num_sampled, self.spec.hidden_size, dtype=self.dtype)

        def multiply() -> None:
            for layer in self._layers:
                for product, x in zip(layer.products, inputs, strict=True):
                    product.multiply(x)
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

    def _add_norm(self, added: Tensor | None, residual: Tensor, weight: Tensor | None, out: Tensor) -> Tensor:
        """Adds to the residual stream, and returns its norm, in `out`; without a norm, the residual stream itself."""
        if weight is None:
            return residual if added is None else residual.add_(added)
        rows, dim = residual.shape
        self._kernels.add_rms_norm(
            _pointer(added), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, dim, self.spec.rms_norm_eps
        )
        return out


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
