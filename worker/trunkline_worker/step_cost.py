"""What a step costs, learned from the steps themselves, and how long a prompt's chunk may be to stay under a time.

time = fixed + a * tokens + b * KV tokens read by decodes + c * (query, key) pairs of chunks. The coefficients are
fitted to the latest steps by least squares of the relative error, none of them negative. What the steps do not tell
apart, because they were all alike, counts as fixed.
"""

from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

KEPT_STEPS = 96  # of each kind: with chunks, and without
STEPS_PER_FIT = 32
# Where one choice alone takes a step nearly to its target time, or past it, others may still add this share of that.
LEAST_ADDED_SHARE = 0.25
DECODE_SAMPLE_EVERY = 8  # of steps that only decode, which are many and alike
# A coefficient weighs on the fit (ridge) as this times what it adds to a large step, in multiples of a usual step.
# A worker's first steps are a few that are slow for being first, and many small ones that are all alike: any split of
# their time fits them equally well, and without this a prompt of 33 tokens was thought to take 0.8 s instead of 0.016,
# and was sent elsewhere ever after. Steps that differ outweigh it by far.
RESTRAINT = 0.01
LARGE_STEP = np.array([0.0, 512.0, 65536.0, 65536.0])  # in the order of the coefficients


class StepLoad(NamedTuple):
    """What a step's time depends on."""

    num_tokens: int  # padding included
    decode_kv_tokens: int  # context lengths of one-token sequences, summed
    chunk_pairs: float  # (query, key) pairs of longer chunks


class StepCost:
    """The model and the steps that it was fitted to."""

    def __init__(self) -> None:
        self._decodes: deque[tuple[NDArray[np.float64], float]] = deque(maxlen=KEPT_STEPS)
        self._chunks: deque[tuple[NDArray[np.float64], float]] = deque(maxlen=KEPT_STEPS)
        self._seen = 0
        self._decode_steps = 0
        self.num_fits = 0
        self.fixed_s = self.token_s = self.kv_token_s = self.pair_s = 0.0

    @property
    def is_known(self) -> bool:
        return self._seen >= STEPS_PER_FIT

    def observe(self, load: StepLoad, time_s: float) -> None:
        """A step took this long on the device."""
        if load.chunk_pairs:
            kept = self._chunks
        else:
            self._decode_steps += 1
            if self._decode_steps % DECODE_SAMPLE_EVERY:
                return
            kept = self._decodes
        if time_s <= 0:
            return
        features = np.array([1.0, load.num_tokens, load.decode_kv_tokens, load.chunk_pairs])
        kept.append((features, time_s))
        self._seen += 1
        if self._seen % STEPS_PER_FIT == 0:
            self._fit()

    def time_s(self, load: StepLoad) -> float:
        """What a step should take."""
        return (
            self.fixed_s
            + self.token_s * load.num_tokens
            + self.kv_token_s * load.decode_kv_tokens
            + self.pair_s * load.chunk_pairs
        )

    def chunk_s(self, num_tokens: int, num_before: int) -> float:
        """What a chunk of `num_tokens` after `num_before` computed ones adds to a step."""
        return self.token_s * num_tokens + self.pair_s * chunk_pairs(num_tokens, num_before)

    def longest_chunk(self, time_s: float, num_before: int) -> int:
        """Most tokens of a prompt, after `num_before` computed ones, that add no more than `time_s` to a step."""
        if time_s <= 0:
            return 0
        a, b = self.pair_s / 2, self.token_s + self.pair_s * num_before
        if a > 1e-18:
            return int((-b + (b * b + 4 * a * time_s) ** 0.5) / (2 * a))
        return int(time_s / b) if b > 1e-15 else 1 << 30

    def _fit(self) -> None:
        """Non-negative least squares: what comes out negative is left out, and the rest fitted again."""
        self.num_fits += 1
        samples = [*self._decodes, *self._chunks]
        times = np.array([time_s for _, time_s in samples])
        # Each row divided by its time: a relative error of a short step counts as much as one of a long step.
        # The middle of the ratios is what counts, so that a step which was held up by something else does not.
        rows = np.stack([features for features, _ in samples])
        scale = np.maximum(rows.max(axis=0), 1.0)
        matrix = rows / scale / times[:, None]
        restraint = np.diag(RESTRAINT * LARGE_STEP / scale / np.median(times))
        weights = np.ones(len(samples))
        used = np.ones(4, bool)
        solution = np.zeros(4)
        for _ in range(6):
            solution = np.zeros(4)
            rows = np.concatenate([matrix * weights[:, None], restraint])[:, used]
            solution[used] = np.linalg.lstsq(rows, np.append(weights, np.zeros(4)), rcond=1e-6)[0]
            if (solution < 0).any():
                used &= solution >= 0
                continue
            residual = np.abs(matrix @ solution - 1)
            before, weights = weights, np.where(residual > 0.5, np.sqrt(0.5 / np.maximum(residual, 0.5)), 1.0)
            if np.array_equal(weights, before):
                break  # all that follows would be equal
        solution = np.maximum(solution, 0.0) / scale
        self.fixed_s, self.token_s, self.kv_token_s, self.pair_s = solution.tolist()


def chunk_pairs(num_tokens: int, num_before: int) -> float:
    """(query, key) pairs of a causal chunk."""
    return num_tokens * (num_before + num_tokens / 2)
