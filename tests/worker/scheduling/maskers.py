"""A masker that shows whether a mask was made of the right tokens."""

import random
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from trunkline_worker.cache.sequence import Sequence
from trunkline_worker.step.plan import Run


class Climbing:
    """Tokens after the prompt climb by 1, modulo 3: a mask of the wrong tokens is seen in the output. Only sequences of
    odd id are constrained. A share of the masks is late."""

    def __init__(self, vocab: int, *, late: float = 0.0) -> None:
        self._vocab, self._late = vocab, late
        self._draw = random.Random(1)
        self.num_late = 0

    def constrains(self, sequence: Sequence) -> bool:
        return bool(sequence.sequence_id % 2)

    def masks(self, sequence: Sequence, run: Run | None) -> NDArray[np.int32] | None:
        if self._draw.random() < self._late:
            self.num_late += 1
            return None
        before = [sequence.token_ids[-1], *(run.token_ids[: run.num_new] if run else [])]
        before = before[len(before) - run.num_samples :] if run else before
        return np.stack([climbing(self._vocab, last) for last in before])


def climbing(vocab: int, last: int) -> NDArray[np.int32]:
    """The mask of the token after the last one."""
    return packed(np.arange(vocab) % 3 == (last + 1) % 3)


def packed(allowed: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Booleans as a mask: [ceil(vocab / 32)]."""
    room = np.zeros(-(-len(allowed) // 32) * 32, bool)
    room[: len(allowed)] = allowed
    return np.packbits(room, bitorder="little").view(np.int32)


def climbs(prompt: list[int], output: list[int]) -> bool:
    """Whether an output keeps the rule."""
    tokens = [prompt[-1], *output]
    return all((after - before) % 3 == 1 for before, after in pairwise(tokens))
