"""Writes a step's new keys and values to the paged pool."""

from torch import Tensor

from trunkline_kernels.ragged_batch import KVLayer


def write_kv(kv: KVLayer, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Writes to `kv`. keys, values: [num_tokens, num_kv_heads, head_dim]; slots: [num_tokens] int64, all different"""
    kv.keys.view(-1, *kv.keys.shape[2:]).index_copy_(0, slots, keys)
    kv.values.view(-1, *kv.values.shape[2:]).index_copy_(0, slots, values)
