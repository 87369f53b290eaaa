"""What one worker's prefix cache holds: its part of the fleet's index."""

from array import array
from collections import deque
from collections.abc import Sequence

from trunkline_router.routing.prefix_index import PrefixIndex

# Of the prompts sent to a worker of late these are remembered, to be counted on where its own reports are not.
MOST_RECENT_PROMPTS = 256
MOST_RECENT_BLOCKS = 1 << 14  # of 8 bytes each


class WorkerBlocks:
    """Blocks that one worker holds, or is about to hold, by their keys: see prefix_index.py.

    Expected ones are the prompts of requests that this router has just sent there: a burst with one prefix stays
    together although the worker has not reported its blocks yet. They count as long as their request runs. While the
    worker's reports do not count, recent prompts count too.
    """

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self.slot = index.attach()
        self._recent: deque[array[int]] = deque()
        self._num_recent = 0  # blocks in them
        self._by_dispatches = False
        self._closed = False

    def __len__(self) -> int:
        return self._index.num_held[self.slot]

    @property
    def bit(self) -> int:
        """The worker's bit in what the index answers."""
        return 1 << self.slot

    def store(self, keys: Sequence[int]) -> None:
        self._index.store(self.slot, keys)

    def remove(self, keys: Sequence[int]) -> None:
        self._index.remove(self.slot, keys)

    def reported(self, chain: Sequence[int]) -> int:
        """How many leading blocks of a chain the worker holds by its own account."""
        return 0 if self._closed else self._index.reported(self.slot, chain)

    def clear(self) -> None:
        """Forgets what was reported, at once; it is freed bit by bit. What is expected stays expected."""
        if not len(self):
            return
        old, self.slot = self.slot, self._index.attach()
        self._index.move_expected(old, self.slot)
        if self._by_dispatches:
            self._index.distrust(self.slot)
        self._index.detach(old)

    def sweep(self) -> bool:
        """Frees a slice of what is no longer held; whether more is left."""
        return self._index.sweep()

    def close(self) -> None:
        """The worker is gone, and what it was expected to hold."""
        self._recent.clear()
        self._closed = True
        self._index.detach(self.slot)

    # What this router sends there

    def expect(self, keys: Sequence[int]) -> None:
        """Harmless after close(), when the slot may be another worker's."""
        if not self._closed:
            self._index.expect(self.slot, keys)

    def stop_expecting(self, keys: Sequence[int]) -> None:
        """Harmless after close()."""
        if not self._closed:
            self._index.stop_expecting(self.slot, keys)

    def remember(self, chain: Sequence[int]) -> None:
        """A prompt that was computed there."""
        if self._closed:
            return
        self._recent.append(array("Q", chain[:MOST_RECENT_BLOCKS]))
        self._num_recent += len(self._recent[-1])
        if self._by_dispatches:
            self.expect(self._recent[-1])
        while self._num_recent > MOST_RECENT_BLOCKS or len(self._recent) > MOST_RECENT_PROMPTS:
            oldest = self._recent.popleft()
            self._num_recent -= len(oldest)
            if self._by_dispatches:
                self.stop_expecting(oldest)

    def rely_on_reports(self) -> None:
        """What the worker reports counts, and what is on its way there."""
        if self._by_dispatches and not self._closed:
            self._by_dispatches = False
            self._index.trust(self.slot)
            for chain in self._recent:
                self.stop_expecting(chain)

    def rely_on_dispatches(self) -> None:
        """What this router sent there of late counts, and nothing that the worker reports."""
        if not self._by_dispatches and not self._closed:
            self._by_dispatches = True
            self._index.distrust(self.slot)
            for chain in self._recent:
                self.expect(chain)

    @property
    def num_expected(self) -> int:
        """Blocks that requests on their way will leave there, and recent ones while they count."""
        return 0 if self._closed else self._index.num_expected(self.slot)
