"""Attention in both directions over a ragged batch of whole texts, by the C kernel. Reference: full_attention.py."""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trunkline_kernels.cpu.library import I64, P

MOST_QUERIES = 512  # of a text that are one item of work: more are shared among threads


class _Texts(ctypes.Structure):
    _fields_ = (
        ("items", P), ("num_items", I64), ("dim", I64), ("space", P), ("room", I64), ("threads", I64),
    )  # fmt: skip


class TextAttention:
    """Attention of texts of these lengths."""

    def __init__(self, kernels: ctypes.CDLL, lengths: Sequence[int], head_dim: int) -> None:
        self._kernels, self._head_dim = kernels, head_dim
        starts = np.cumsum([0, *lengths])
        items = [
            (start, length, first, min(first + MOST_QUERIES, length))
            for start, length in zip(starts[:-1].tolist(), lengths, strict=True)
            for first in range(0, length, MOST_QUERIES)
        ]
        items.sort(key=lambda item: item[1], reverse=True)  # the longest first, so that threads end together
        self._items = np.array(items, np.int64)
        self._longest, self._num_tokens = max(lengths), sum(lengths)
        room, threads = kernels.text_attention_room(self._longest, head_dim), torch.get_num_threads()
        self._space = torch.empty(threads * room, dtype=torch.float32)
        self._texts = _Texts(self._items.ctypes.data, len(items), head_dim, self._space.data_ptr(), room, threads)

    def of(self, q: Tensor, k: Tensor, v: Tensor, *, window: int | None) -> Tensor:
        """Every token of a text attends to all of its tokens, or to those at most `window` positions away.

        q, k, v: [num_tokens, num_heads, head_dim], text after text; the heads of a token lie side by side → like q
        """
        num_heads, dim = q.shape[1], self._head_dim
        assert all(x.stride()[1:] == (dim, 1) for x in (q, k, v)), "the kernel reads heads that lie side by side"
        assert q.shape == k.shape == v.shape, "every token has a query, a key and a value"
        assert q.shape == (self._num_tokens, num_heads, dim), "the tokens are those of the texts"
        attended = q.new_empty(q.shape)
        strides = (I64 * 3)(q.stride(0), k.stride(0), v.stride(0))
        self._kernels.text_attention(
            ctypes.byref(self._texts), q.data_ptr(), k.data_ptr(), v.data_ptr(), strides, attended.data_ptr(),
            num_heads, -1 if window is None else min(window, self._longest),
        )  # fmt: skip
        return attended
