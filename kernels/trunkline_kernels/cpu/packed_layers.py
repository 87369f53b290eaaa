"""All layers of a decoder in one call, if each has attention and a gated part with a norm before it, and no more.

At few rows, a call from Python takes about as long as the products of a layer.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trunkline_kernels.cpu.library import F32, I64, P
from trunkline_kernels.cpu.packed_linear import LinearArguments, PackedLinear
from trunkline_kernels.ragged_batch import KVLayer, PagedBatch


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """What a layer computes with. Queries and keys may have a norm for each head."""

    norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    fed_norm: Tensor
    qkv: PackedLinear
    output: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    tables: tuple[Tensor, Tensor]  # cos and sin: [positions, pairs]
    window: int | None


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """What all layers have in common."""

    hidden: int
    heads: int
    kv_heads: int
    dim: int
    eps: float
    scale: float


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, P) for name in ("norm", "query_norm", "key_norm", "fed_norm")),
        *((name, LinearArguments) for name in ("qkv", "output", "gate_up", "down")),
        ("cos", P),
        ("sin", P),
        ("pairs", I64),
        ("window", I64),
    )


class _Pool(ctypes.Structure):
    _fields_ = (("keys", P), ("values", P), ("block_stride", I64))


class _Batch(ctypes.Structure):
    _fields_ = (("tables", P), ("starts", P), ("contexts", P), ("num_seqs", I64), ("block_size", I64))


class _Sizes(ctypes.Structure):
    _fields_ = (*((name, I64) for name in ("hidden", "heads", "kv_heads", "dim")), ("eps", F32), ("scale", F32))


class PackedLayers:
    """Computes what its layers compute one after another, to the bit. Their tensors must outlive it."""

    def __init__(self, kernels: ctypes.CDLL, sizes: LayerSizes, layers: Sequence[PackedLayer]) -> None:
        self._kernels, self._count = kernels, len(layers)
        self._sizes = _Sizes(sizes.hidden, sizes.heads, sizes.kv_heads, sizes.dim, sizes.eps, sizes.scale)
        self._layers = (_Layer * len(layers))(*map(_arguments, layers))
        queries, keys = sizes.heads * sizes.dim, sizes.kv_heads * sizes.dim
        fed = max(layer.gate_up.arguments.out for layer in layers)
        # Attended and queries; normed and added; queries, keys and values; gate and up, and their product.
        self._values = 2 * queries + 2 * sizes.hidden + queries + 2 * keys + fed + fed // 2
        self._room = max(
            product.room for layer in layers for product in (layer.qkv, layer.output, layer.gate_up, layer.down)
        )

    def forward(self, residual: Tensor, batch: PagedBatch, kv: Sequence[KVLayer]) -> None:
        """Adds to the residual stream [num_rows, hidden], contiguous. Rows behind those of the batch are padding."""
        pools = (_Pool * self._count)(
            *(_Pool(pool.keys.data_ptr(), pool.values.data_ptr(), pool.block_stride) for pool in kv)
        )
        where = _Batch(
            batch.tables.data_ptr(), batch.starts.data_ptr(), batch.contexts.data_ptr(), len(batch.contexts),
            batch.block_size,
        )  # fmt: skip
        rows = len(residual)
        space, arranged = residual.new_empty(rows * self._values), torch.empty(rows * self._room, dtype=torch.float32)
        self._kernels.run_layers(
            self._layers, pools, self._count, ctypes.byref(self._sizes), ctypes.byref(where), residual.data_ptr(),
            space.data_ptr(), arranged.data_ptr(), rows,
        )  # fmt: skip


def _arguments(layer: PackedLayer) -> _Layer:
    cos, sin = layer.tables
    norms = layer.norm, layer.query_norm, layer.key_norm, layer.fed_norm
    return _Layer(
        *(None if norm is None else norm.data_ptr() for norm in norms),
        *(product.arguments for product in (layer.qkv, layer.output, layer.gate_up, layer.down)),
        cos.data_ptr(), sin.data_ptr(), cos.shape[1], layer.window or 0,
    )  # fmt: skip
