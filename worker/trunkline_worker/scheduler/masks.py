"""What constrains the samples of sequences, such as a grammar."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from trunkline_worker.cache.sequence import Sequence
from trunkline_worker.step.plan import Run


class Masker(Protocol):
    """Says which tokens may follow those of a sequence. The rows that it constrains are sampled in the second part of a
    step, when all tokens before them are known. An exception ends the sequence for which it is raised."""

    def constrains(self, sequence: Sequence) -> bool:
        """Whether the next sample of a sequence needs a mask. Its latest tokens may still be unknown."""

    def masks(self, sequence: Sequence, run: Run | None) -> NDArray[np.int32] | None:
        """The masks of the sample after the sequence's tokens, or of all samples of a run that follows them: see
        plan.Masks. None: they are not ready, and the sequence sits out the step."""
