"""The most KV blocks that a running set will need at once, as far as output lengths can be foretold.

All sequences grow by a token per step, and one gives its blocks back when it ends; the peak therefore lies at one of
the ends. Source of the idea: LightLLM's past-future scheduler (Gong et al., ASPLOS 2025).
"""

import numpy as np
from numpy.typing import NDArray

# Standard deviations of the sum of the lengths that are kept in hand. With 1.5 about one forecast in fifteen is short.
SAFETY_DEVIATIONS = 1.5


def peak_blocks(
    own: NDArray[np.int64],
    remaining: NDArray[np.float64],
    variance: NDArray[np.float64],
    *,
    shared: int,
    block_size: int,
) -> float:
    """Blocks live at the worst moment, if nothing else is admitted.

    own: blocks that a sequence alone holds; remaining: tokens that it will still add; variance: of those;
    shared: live blocks that no single sequence gives back by ending. All arrays [num_sequences].
    """
    if not len(own):
        return float(shared)
    order = np.argsort(remaining)
    own, remaining, variance = own[order], remaining[order], variance[order]
    alive = np.arange(len(own), 0, -1)  # at the end of the k-th one, it and all that end later hold their blocks
    held = np.cumsum(own[::-1])[::-1]
    spread = np.sqrt(np.cumsum(variance[::-1])[::-1])
    # Half a block each: a sequence's last block is half full on average.
    needed = held + alive * (remaining / block_size + 0.5) + SAFETY_DEVIATIONS * spread / block_size
    return shared + float(needed.max())
