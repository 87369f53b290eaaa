"""Writes a step's new keys and values to the paged pool."""

from torch import Tensor

from trunkline_kernels.ragged_batch import KVLayer


def write_kv(kv: KVLayer, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Writes to `kv`. keys, values: [num_tokens, num_kv_heads, head_dim]; slots: [num_tokens] int64, all different"""
    where = slots // kv.keys.shape[1], slots % kv.keys.shape[1]
    kv.keys[where], kv.values[where] = keys, values
