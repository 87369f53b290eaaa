"""How large a step may be, judged by the best of the steps before it.

What steps cost is fitted to those that were seen (step_cost.py). Far beyond these a fit is a guess: steps of five
tokens say next to nothing about two thousand. One bound holds there too. A step that is k times as large as another one
takes at most k times as long, because it could be computed as k such steps. So the most tokens per second that any step
came to are a speed on which every larger step can rely, and so are the most pairs and the most sequences per second.

A worker's first steps are therefore small, and each of the following fills its target time by what is known so far. A
step that was slow by accident does no harm: it is not the best one.
"""

from collections.abc import Iterable
from typing import NamedTuple

# A fit is relied on for steps that are so many times as large as the largest one that it explains.
TRUSTED_TIMES = 2.0
# It explains a step that took no more than so many times the fitted time.
EXPLAINED_TIMES = 1.5
# A speed that recent steps have not reached is forgotten by so much with each fit: the device may have become slower.
KEPT_SHARE = 0.9


class Size(NamedTuple):
    """What makes a step large; or so much of it per second."""

    tokens: float
    pairs: float  # (query, key) pairs of chunks
    sequences: float


NOTHING = Size(0.0, 0.0, 0.0)


class Experience:
    """Speeds that steps came to, and sizes for which the fit is relied on."""

    def __init__(self, trusted: Size = NOTHING) -> None:
        self.trusted = trusted
        self._speeds = NOTHING

    def observe(self, size: Size, time_s: float) -> None:
        """A step took this long; 0: its executor tells no times."""
        if time_s > 0:
            self._speeds = Size(*map(max, self._speeds, [part / time_s for part in size]))
        else:
            self._speeds = Size(*[float("inf") for _ in size])

    def fitted(self, steps: Iterable[tuple[Size, float, float]]) -> None:
        """A fit was made of steps: of each, its size, its time and the fitted time in seconds."""
        trusted = fastest = NOTHING
        for size, time_s, fitted_s in steps:
            fastest = Size(*map(max, fastest, [part / time_s for part in size]))
            if time_s <= EXPLAINED_TIMES * fitted_s:
                # Beside chunks, what the sequences of a step cost is hidden: only decodes tell of it.
                trusted = Size(*map(max, trusted, size._replace(sequences=0) if size.pairs else size))
        self.trusted = Size(*[TRUSTED_TIMES * part for part in trusted])
        self._speeds = Size(*map(max, fastest, [KEPT_SHARE * speed for speed in self._speeds]))

    def room(self, time_s: float, pairs_per_token: float) -> tuple[float, float]:
        """Most tokens and most pairs of a step that takes no longer than this, as far as is known.

        pairs_per_token: so many pairs cost no more than a token
        """
        speeds = self._speeds
        pairs_per_s = max(speeds.pairs, pairs_per_token * speeds.tokens)
        return max(self.trusted.tokens, time_s * speeds.tokens), max(self.trusted.pairs, time_s * pairs_per_s)

    def longest_s(self, tokens: float, sequences: float) -> float:
        """Longest time that a step of so many tokens and sequences without chunks takes; 0 where the fit is relied on,
        and infinite where there was no step yet."""
        longest_s = 0.0
        for amount, trusted, speed in (
            (tokens, self.trusted.tokens, self._speeds.tokens),
            (sequences, self.trusted.sequences, self._speeds.sequences),
        ):
            if amount > trusted:
                longest_s = max(longest_s, amount / speed if speed else float("inf"))
        return longest_s
