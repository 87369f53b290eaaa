"""What constrains the samples of sequences, such as a grammar."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from trunkline_worker.cache.sequence import Sequence


class Masker(Protocol):
    """Says which tokens may follow those of a sequence. The rows that it constrains are sampled in the second part of a
    step, when all tokens before them are known."""

    def constrains(self, sequence: Sequence) -> bool:
        """Whether the next sample of a sequence needs a mask. Its latest tokens may still be unknown."""

    def mask(self, sequence: Sequence) -> NDArray[np.int32] | None:
        """The mask of the sample after the sequence's tokens: see plan.Masks. None: it is not ready, and the sequence
        sits out the step."""
