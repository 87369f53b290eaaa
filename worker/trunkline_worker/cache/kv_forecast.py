"""The most KV blocks that a running set will need at once, by the forecast of output lengths.

All sequences grow by a token per step, and a sequence frees its blocks when it ends; the peak therefore lies at the end
of one of them. Source of the idea: LightLLM's past-future scheduler (Gong et al., ASPLOS 2025).
"""

import numpy as np
from numpy.typing import NDArray

# Margin, in standard deviations of the sum of the lengths. With 1.5 about one forecast in fifteen is too low.
SAFETY_DEVIATIONS = 1.5


def peak_blocks(
    own: NDArray[np.int64],
    remaining: NDArray[np.float64],
    variance: NDArray[np.float64],
    *,
    shared: int,
    block_size: int,
) -> float:
    """The most live blocks at any moment, if no other sequence is admitted.

    own: blocks that only this sequence holds; remaining: tokens that it will still add; variance: of `remaining`;
    shared: live blocks that no single sequence frees by ending. All arrays [num_sequences].
    """
    if not len(own):
        return float(shared)
    order = np.argsort(remaining)
    own, remaining, variance = own[order], remaining[order], variance[order]
    alive = np.arange(len(own), 0, -1)  # at the end of the k-th one, it and all that end later hold their blocks
    held = np.cumsum(own[::-1])[::-1]
    spread = np.sqrt(np.cumsum(variance[::-1])[::-1])
    # Half a block is added for each: a sequence's last block is half full on average.
    needed = held + alive * (remaining / block_size + 0.5) + SAFETY_DEVIATIONS * spread / block_size
    return shared + float(needed.max())
