"""What each worker's prefix cache holds, as far as its events tell. Pure: no I/O, no clock.

A hash is a hint: if the index is wrong, a request is computed where it need not have been, and nothing else.
"""

from collections import Counter
from collections.abc import Sequence

FREED_AT_ONCE = 8192  # entries; about half a millisecond


class WorkerBlocks:
    """Hashes of the blocks that one worker holds, or is about to hold.

    Expected ones are the prompts of requests that this router has just sent there: a burst with one prefix stays
    together although the worker has not reported its blocks yet. They count as long as their request runs.
    """

    def __init__(self) -> None:
        self._held: set[bytes] = set()
        self._retired: list[set[bytes]] = []  # forgotten, but not freed yet
        self._expected: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._held or digest in self._expected

    def store(self, digests: Sequence[bytes]) -> None:
        self._held.update(digests)
        self.free_some()

    def remove(self, digests: Sequence[bytes]) -> None:
        self._held.difference_update(digests)

    def clear(self) -> None:
        """Forgets what was reported, at once; freeing a million entries takes a while and is left to free_some()."""
        if self._held:
            self._retired.append(self._held)
        self._held = set()

    def free_some(self) -> bool:
        """Frees a slice of what was forgotten; whether more of it is left. Called from time to time by whoever can."""
        if not self._retired:
            return False
        doomed = self._retired[-1]
        for _ in range(min(FREED_AT_ONCE, len(doomed))):
            doomed.pop()
        if not doomed:
            self._retired.pop()
        return bool(self._retired)

    def expect(self, digests: Sequence[bytes]) -> None:
        self._expected.update(digests)

    def stop_expecting(self, digests: Sequence[bytes]) -> None:
        for digest in digests:
            if self._expected[digest] <= 1:
                del self._expected[digest]
            else:
                self._expected[digest] -= 1

    @property
    def num_expected(self) -> int:
        """Blocks that requests on their way will leave there."""
        return len(self._expected)

    def longest_prefix(self, chain: Sequence[bytes]) -> int:
        """How many leading blocks of a chain of hashes are held.

        The cached set is prefix-closed, so a binary search finds the border in log n probes. Between the events of one
        step that can be untrue for a moment; then the answer is a hint that is off.
        """
        low, high = 0, len(chain)
        while low < high:
            middle = (low + high) // 2
            if chain[middle] in self:
                low = middle + 1
            else:
                high = middle
        return low
