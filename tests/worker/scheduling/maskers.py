"""A masker that shows whether a mask was made of the right tokens."""

import random
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from trunkline_worker.cache.sequence import Sequence


class Climbing:
    """Tokens after the prompt climb by 1, modulo 3: a mask of the wrong tokens is seen in the output. Only sequences of
    odd id are constrained. A share of the masks is late."""

    def __init__(self, vocab: int, *, late: float = 0.0) -> None:
        self._vocab, self._late = vocab, late
        self._draw = random.Random(1)
        self.num_late = 0

    def constrains(self, sequence: Sequence) -> bool:
        return bool(sequence.sequence_id % 2)

    def mask(self, sequence: Sequence) -> NDArray[np.int32] | None:
        if self._draw.random() < self._late:
            self.num_late += 1
            return None
        return packed(np.arange(self._vocab) % 3 == (sequence.token_ids[-1] + 1) % 3)


def packed(allowed: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Booleans as a mask of one sample: [1, ceil(vocab / 32)]."""
    room = np.zeros(-(-len(allowed) // 32) * 32, bool)
    room[: len(allowed)] = allowed
    return np.packbits(room, bitorder="little").view(np.int32)[None]


def climbs(prompt: list[int], output: list[int]) -> bool:
    """Whether an output keeps the rule."""
    tokens = [prompt[-1], *output]
    return all((after - before) % 3 == 1 for before, after in pairwise(tokens))
