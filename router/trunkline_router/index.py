"""What one worker's prefix cache holds: its part of the fleet's index."""

from collections import Counter
from collections.abc import Sequence

from trunkline_router.prefix_index import PrefixIndex


class WorkerBlocks:
    """Blocks that one worker holds, or is about to hold, by their keys: see prefix_index.py.

    Expected ones are the prompts of requests that this router has just sent there: a burst with one prefix stays
    together although the worker has not reported its blocks yet. They count as long as their request runs.
    """

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._slot = index.attach()
        self._expected: Counter[int] = Counter()
        self._closed = False

    def __len__(self) -> int:
        return self._index.num_held[self._slot]

    @property
    def bit(self) -> int:
        """The worker's bit in what the index answers."""
        return 1 << self._slot

    def store(self, keys: Sequence[int]) -> None:
        self._index.store(self._slot, keys)

    def remove(self, keys: Sequence[int]) -> None:
        self._index.remove(self._slot, keys)

    def clear(self) -> None:
        """Forgets what was reported, at once; it is freed bit by bit. What is expected stays expected."""
        if not len(self):
            return
        old, self._slot = self._slot, self._index.attach()
        for key, count in self._expected.items():
            for _ in range(count):
                self._index.stop_expecting(old, (key,))
                self._index.expect(self._slot, (key,))
        self._index.detach(old)

    def close(self) -> None:
        """The worker is gone, and what it was expected to hold."""
        for key, count in self._expected.items():
            for _ in range(count):
                self._index.stop_expecting(self._slot, (key,))
        self._expected.clear()
        self._closed = True
        self._index.detach(self._slot)

    def expect(self, keys: Sequence[int]) -> None:
        """Harmless after close(), when the slot may be another worker's."""
        if self._closed:
            return
        self._index.expect(self._slot, keys)
        self._expected.update(keys)

    def stop_expecting(self, keys: Sequence[int]) -> None:
        """Harmless after close()."""
        for key in keys:
            count = self._expected[key]
            if not count:
                continue
            self._index.stop_expecting(self._slot, (key,))
            if count == 1:
                del self._expected[key]
            else:
                self._expected[key] = count - 1

    @property
    def num_expected(self) -> int:
        """Blocks that requests on their way will leave there."""
        return len(self._expected)
