"""What routing must know of a request."""

from collections.abc import Sequence
from dataclasses import dataclass

INTERACTIVE, STANDARD, BATCH = range(3)
NUM_LANES = 3


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """A request at the moment of choosing. One that goes on elsewhere brings what it has said as a part of its prompt.

    `now_s` is on the clock that tells WorkerState when it heard of its worker.
    """

    prompt: Sequence[int]
    now_s: float = 0.0
    salt: bytes = b""
    lane: int = STANDARD  # 0, 1, 2: lower ones go first
    choices: int = 1
    may_use_cache: bool = True  # not where every token of the prompt must be computed
    affinity_key: str = ""  # requests with an equal one belong together; empty: with none

    def most_reusable(self, block_size: int) -> int:
        """Prompt tokens that a cache can save: whole blocks, and at least one token is computed."""
        return (len(self.prompt) - 1) // block_size * block_size if self.may_use_cache else 0
