"""The least work of a step of a dense decoder: the bytes that it must move, and its floating-point operations.

A step reads the layers' weights once, the head's if it computes logits, and the keys and values of each sequence's
context; it writes those of its new tokens. Products take two operations for each parameter and row, attention four for
each (query, key) pair and each element of a query head. Activations, norms and embedding rows are left out: they are
small, and can stay on the chip.
"""

from collections.abc import Iterable
from typing import NamedTuple

from trunkline_worker.step.plan import SequenceStep


def layer_params(*, hidden: int, heads: int, kv_heads: int, head_dim: int, intermediate: int) -> int:
    """Parameters of the matrices of one layer."""
    return hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * intermediate


def pair_flops(heads: int, head_dim: int) -> int:
    """Operations of one (query, key) pair in one layer."""
    return 4 * heads * head_dim


def kv_token_bytes(kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Bytes of the keys and values of one token in one layer."""
    return 2 * kv_heads * head_dim * itemsize


class Attended(NamedTuple):
    """What the attention of a step works on, a mean over layers: windows bound it in some of them."""

    kv_tokens: float  # contexts, summed
    pairs: float  # (query, key) pairs


class StepWork(NamedTuple):
    """The least work of one step."""

    num_bytes: float
    flops: float


class ModelWork(NamedTuple):
    """What the work of a model's steps depends on."""

    layer_params: int  # of the matrices of all layers
    head_params: int
    layer_bytes: int  # weights of all layers
    head_bytes: int
    kv_token_bytes: int  # keys and values of one token, in all layers
    pair_flops: int  # of a (query, key) pair, in all layers
    windows: tuple[int | None, ...] = (None,)  # by layer; None: all positions

    @property
    def has_windows(self) -> bool:
        return any(window is not None for window in self.windows)

    def layer_flops(self, rows: float) -> float:
        """Operations of the products of all layers."""
        return 2.0 * self.layer_params * rows

    def head_flops(self, rows: float) -> float:
        """Operations of the logits of some rows."""
        return 2.0 * self.head_params * rows

    def attention_flops(self, pairs: float) -> float:
        return self.pair_flops * pairs

    def step(self, num_tokens: int, num_logits: int, attended: Attended) -> StepWork:
        """The work of a step with new tokens, of which `num_logits` need logits."""
        weights = self.layer_bytes + (self.head_bytes if num_logits else 0)
        return StepWork(
            weights + self.kv_token_bytes * (attended.kv_tokens + num_tokens),
            self.layer_flops(num_tokens) + self.head_flops(num_logits) + self.attention_flops(attended.pairs),
        )

    def attended(self, steps: Iterable[SequenceStep]) -> Attended:
        """What the entries of a plan attend to. A loop over them: for models with windows."""
        kinds = {window: self.windows.count(window) / len(self.windows) for window in set(self.windows)}
        kv_tokens = pairs = 0.0
        for step in steps:
            context = step.num_computed + step.num_new
            for window, share in kinds.items():
                within = context if window is None else min(context, window - 1 + step.num_new)
                kv_tokens += share * within
                pairs += share * num_pairs(step.num_computed, step.num_new, window)
        return Attended(kv_tokens, pairs)


def num_pairs(num_computed: int, num_new: int, window: int | None = None) -> float:
    """(query, key) pairs of new tokens after computed ones: each token sees those before it, and itself."""
    growing = num_new if window is None else min(max(window - num_computed, 0), num_new)
    full = (num_new - growing) * window if window is not None else 0
    return growing * (num_computed + (growing + 1) / 2) + full
