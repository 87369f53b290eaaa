"""A request as the routing policy sees it."""

from collections.abc import Sequence
from dataclasses import dataclass

INTERACTIVE, STANDARD, BATCH = range(3)
NUM_LANES = 3


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """A request at the moment of the decision. If it continues after a failure, its prompt includes the output so far.

    `now_s` is on the same clock as the times that WorkerState gets.
    """

    prompt: Sequence[int]
    now_s: float = 0.0
    salt: bytes = b""
    lane: int = STANDARD  # 0, 1 or 2: lower ones go first
    choices: int = 1
    may_use_cache: bool = True  # False if every token of the prompt must be computed
    affinity_key: str = ""  # equal for requests of one conversation; empty: none

    def most_reusable(self, block_size: int) -> int:
        """Returns how many prompt tokens a cache can save: whole blocks, and at least one token is computed."""
        return (len(self.prompt) - 1) // block_size * block_size if self.may_use_cache else 0
