"""What could be had at best: the hits of a cache that is shared by all workers and never forgets."""

from bisect import bisect_left
from collections.abc import Sequence


class SharedCache:
    """Holds what every request before has brought, from its arrival on."""

    def __init__(self) -> None:
        self._held: set[int] = set()  # keys of blocks

    def take(self, chain: Sequence[int], num_tokens: int, block_size: int) -> int:
        """Tokens of a prompt that are found, before it is added. One token at least is always computed."""
        held = self._held
        found = bisect_left(chain, True, key=lambda key: key not in held)
        held.update(chain[found:])
        return min(found, (num_tokens - 1) // block_size) * block_size
