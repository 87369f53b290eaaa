"""The decoder on a CPU: packed matrix products, and C kernels for everything between them.

It computes the same function as decoder.Decoder, which is its reference. decoder.Decoder is used where these kernels do
not apply: in float16, with very large heads or rows, and where there is no C compiler.

Except in oneDNN's products, a row's result depends neither on the other rows nor on how its prompt was cut into steps.
So --deterministic uses the packed products everywhere.
"""

import ctypes
import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from trunkline_kernels.cpu.library import library
from trunkline_kernels.cpu.packed_linear import Linear, PackedLinear, pack_linear
from trunkline_kernels.ragged_batch import KVLayer, PagedBatch
from trunkline_worker.model.checkpoint.refusals import ModelError
from trunkline_worker.model.checkpoint.spec import DecoderSpec
from trunkline_worker.model.decoder import DecoderWeights, LayerWeights
from trunkline_worker.model.rotary_tables import rotary_tables

MAX_HEAD_DIM, MAX_GROUP = 256, 16  # sizes of the C kernels' buffers
MAX_HIDDEN = 1 << 16  # values of the row that the C kernels keep on a thread's stack

Pack = Callable[[Tensor, Tensor | None], Linear]  # returns the product for a weight [out, in] and a bias [out]


class _Layer:
    """A layer's weights in the form that the kernels take."""

    __slots__ = ("down", "gate_up", "input_norm", "key_norm", "output", "post_norm", "qkv", "query_norm")

    def __init__(self, pack: Pack, w: LayerWeights) -> None:
        self.input_norm, self.post_norm = w.input_norm, w.post_norm
        self.query_norm, self.key_norm = w.query_norm, w.key_norm
        self.qkv = pack(w.qkv, w.qkv_bias)
        self.output = pack(w.output, w.output_bias)
        self.gate_up = pack(w.gate_up, w.gate_up_bias)
        self.down = pack(w.down, w.down_bias)


def cpu_decoder(
    spec: DecoderSpec, weights: DecoderWeights, *, context_length: int, deterministic: bool
) -> "CpuDecoder | None":
    """Returns the decoder for these weights, or None if the kernels do not support them. Empties weights.layers. Raises
    ModelError if TRUNKLINE_MARCH names a build that this CPU cannot run."""
    dtype = weights.embedding.dtype
    fits = spec.head_dim <= MAX_HEAD_DIM and spec.num_heads // spec.num_kv_heads <= MAX_GROUP
    fits = fits and spec.hidden_size <= MAX_HIDDEN
    if weights.embedding.device.type != "cpu" or not fits:
        return None
    try:
        kernels = library(dtype)
    except ValueError as error:
        raise ModelError(str(error)) from None
    if kernels is None:
        return None
    pack = partial(PackedLinear if deterministic else pack_linear, kernels)
    return CpuDecoder(spec, weights, kernels, pack, context_length)


class CpuDecoder:
    """Computes hidden states of new tokens, reading and writing the KV pool, and logits, with the C kernels."""

    def __init__(
        self, spec: DecoderSpec, weights: DecoderWeights, kernels: ctypes.CDLL, pack: Pack, context_length: int
    ) -> None:
        self.spec = spec
        self._kernels = kernels
        self._embedding = weights.embedding
        self._final_norm = weights.final_norm
        self._head = pack(weights.head, None)
        self._layers: list[_Layer] = []
        while weights.layers:  # one at a time, so that at most one layer is in memory twice
            self._layers.append(_Layer(pack, weights.layers.pop(0)))
        cos, sin = rotary_tables(spec.rope, spec.head_dim, context_length)
        self._cos, self._sin = cos.contiguous(), sin.contiguous()
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
        x = torch.empty_like(residual)
        q = residual.new_empty(num_rows, heads * dim)
        attended = residual.new_zeros(num_rows, heads * dim) if num_padding else torch.empty_like(q)
        gated = residual.new_empty(num_rows, spec.intermediate_size)
        where = (batch.tables.data_ptr(), batch.starts.data_ptr(), batch.contexts.data_ptr())
        num_seqs = len(batch.contexts)
        added: Tensor | None = None  # still to be added to the residual stream
        for layer, pool, window in zip(self._layers, kv, spec.windows, strict=True):
            self._add_norm(added, residual, layer.input_norm, x)
            qkv = layer.qkv(x)
            keys, values = pool.keys.data_ptr(), pool.values.data_ptr()
            kernels.rotate_and_write(
                qkv.data_ptr(), q.data_ptr(), keys, values, *where, self._cos.data_ptr(), self._sin.data_ptr(),
                _pointer(layer.query_norm), _pointer(layer.key_norm), num_seqs, heads, kv_heads, dim, batch.block_size,
                eps,
            )  # fmt: skip
            kernels.attention(
                q.data_ptr(), keys, values, *where, attended.data_ptr(), num_seqs, heads, kv_heads, dim,
                batch.block_size, window or 0, self._scale,
            )  # fmt: skip
            self._add_norm(layer.output(attended), residual, layer.post_norm, x)
            gate_up = layer.gate_up(x)  # in a variable, because the memory must live until the kernel has finished
            kernels.silu_and_mul(gate_up.data_ptr(), gated.data_ptr(), num_rows, spec.intermediate_size)
            added = layer.down(gated)
        return residual.add_(added)[:count] if added is not None else residual

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns logits [num_rows, vocab] in the model's dtype. hidden: [num_rows, hidden] as forward() returns it"""
        hidden = hidden.contiguous()
        x = torch.empty_like(hidden)
        self._add_norm(None, hidden, self._final_norm, x)
        return self._head(x)

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.dtype

    @property
    def matrix_inputs(self) -> tuple[int, int, int, int]:
        """Input widths of a layer's four matrix products: qkv, output, gate_up, down."""
        spec = self.spec
        return spec.hidden_size, spec.num_heads * spec.head_dim, spec.hidden_size, spec.intermediate_size

    def multiply_only(self, inputs: list[Tensor], hidden: Tensor) -> None:
        """Runs only the matrix products of a step: a benchmark's lower bound for the step's time.

        inputs: [num_rows, width] for each of matrix_inputs; hidden: [num_sampled, hidden]
        """
        for layer in self._layers:
            for product, x in zip((layer.qkv, layer.output, layer.gate_up, layer.down), inputs, strict=True):
                product(x)
        self._head(hidden)

    def greedy(self, logits: Tensor) -> list[int]:
        """Returns the most likely token of each row, or -1 for a row that is not finite. logits: [num_rows, vocab]"""
        ids = torch.empty(len(logits), dtype=torch.int64)
        self._kernels.greedy(logits.data_ptr(), ids.data_ptr(), len(logits), logits.shape[1])
        return ids.tolist()

    def _add_norm(self, added: Tensor | None, residual: Tensor, weight: Tensor, out: Tensor) -> None:
        rows, dim = residual.shape
        self._kernels.add_rms_norm(
            _pointer(added), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, dim, self.spec.rms_norm_eps
        )


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
