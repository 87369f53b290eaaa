"""How large a step may be, judged by the best of the steps before it.

The cost model is fitted to past steps (step_cost.py). Far beyond their sizes the fit is a guess: steps of five tokens
say next to nothing about two thousand. One bound holds there too. A step that is k times as large as another one takes
at most k times as long, because it could be computed as k such steps. So the highest number of tokens per second that
any step reached is a speed that every larger step reaches too; the same holds for pairs and sequences per second.

A worker's first steps are therefore small, and each following step fills its target time by what is known so far. A
step that was slow by chance does no harm: it is not the best one.
"""

from collections.abc import Iterable
from typing import NamedTuple

# A fit is trusted for steps up to this many times as large as the largest step that it explains.
TRUSTED_TIMES = 2.0
# A fit explains a step that took no more than this many times the fitted time.
EXPLAINED_TIMES = 1.5
# With each fit, speeds that recent steps have not reached are reduced to this share: the device may have become slower.
KEPT_SHARE = 0.9


class Size(NamedTuple):
    """What makes a step large; as a speed, the same amounts per second."""

    tokens: float
    pairs: float  # (query, key) pairs of chunks
    sequences: float


NOTHING = Size(0.0, 0.0, 0.0)


class Experience:
    """Speeds that steps have reached, and sizes for which the fit is trusted."""

    def __init__(self, trusted: Size = NOTHING) -> None:
        self.trusted = trusted
        self._speeds = NOTHING

    def observe(self, size: Size, time_s: float) -> None:
        """Learns from a step that took this long; 0: the executor does not measure times."""
        if time_s > 0:
            self._speeds = Size(*map(max, self._speeds, [part / time_s for part in size]))
        else:
            self._speeds = Size(*[float("inf") for _ in size])

    def fitted(self, steps: Iterable[tuple[Size, float, float]]) -> None:
        """Called after a fit. steps: size, time and fitted time, in seconds, of each step that it was made of"""
        trusted = fastest = NOTHING
        for size, time_s, fitted_s in steps:
            fastest = Size(*map(max, fastest, [part / time_s for part in size]))
            if time_s <= EXPLAINED_TIMES * fitted_s:
                # Chunks hide what the sequences of a step cost: only steps of decodes show it.
                trusted = Size(*map(max, trusted, size._replace(sequences=0) if size.pairs else size))
        self.trusted = Size(*[TRUSTED_TIMES * part for part in trusted])
        self._speeds = Size(*map(max, fastest, [KEPT_SHARE * speed for speed in self._speeds]))

    def room(self, time_s: float, pairs_per_token: float) -> tuple[float, float]:
        """The most tokens and the most pairs of a step that takes at most `time_s`, as far as is known.

        pairs_per_token: this many pairs cost no more than a token
        """
        speeds = self._speeds
        pairs_per_s = max(speeds.pairs, pairs_per_token * speeds.tokens)
        return max(self.trusted.tokens, time_s * speeds.tokens), max(self.trusted.pairs, time_s * pairs_per_s)

    def longest_s(self, tokens: float, sequences: float) -> float:
        """The longest time, in seconds, of a step of this many tokens and sequences without chunks; 0 if the fit is
        trusted for it, infinite before the first step."""
        longest_s = 0.0
        for amount, trusted, speed in (
            (tokens, self.trusted.tokens, self._speeds.tokens),
            (sequences, self.trusted.sequences, self._speeds.sequences),
        ):
            if amount > trusted:
                longest_s = max(longest_s, amount / speed if speed else float("inf"))
        return longest_s
