"""The blocks in one worker's prefix cache: its part of the fleet's index."""

from array import array
from collections import deque
from collections.abc import Sequence

from trunkline_router.routing.prefix_index import PrefixIndex

# Recent prompts that are remembered for each worker, and count while its reports do not.
MOST_RECENT_PROMPTS = 256
MOST_RECENT_BLOCKS = 1 << 14  # of 8 bytes each


class WorkerBlocks:
    """The keys of blocks that one worker holds or is expected to hold, see prefix_index.py.

    Expected blocks are those of the prompts of running requests that this router has sent there: so a burst with one
    prefix stays together before the worker reports its blocks. While the worker's reports do not count, the blocks of
    recent prompts count too.
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
        """The worker's bit in the results of the index."""
        return 1 << self.slot

    def store(self, keys: Sequence[int]) -> None:
        self._index.store(self.slot, keys)

    def remove(self, keys: Sequence[int]) -> None:
        self._index.remove(self.slot, keys)

    def reported(self, chain: Sequence[int]) -> int:
        """Returns how many leading blocks of a chain the worker reports to hold."""
        return 0 if self._closed else self._index.reported(self.slot, chain)

    def clear(self) -> None:
        """Forgets the reported blocks at once; calls of sweep() free them. Expected blocks stay."""
        if not len(self):
            return
        old, self.slot = self.slot, self._index.attach()
        self._index.move_expected(old, self.slot)
        if self._by_dispatches:
            self._index.distrust(self.slot)
        self._index.detach(old)

    def sweep(self) -> bool:
        """Frees a slice of the blocks that are no longer held. Returns whether more are left."""
        return self._index.sweep()

    def close(self) -> None:
        """The worker is lost: forgets all of its blocks."""
        self._recent.clear()
        self._closed = True
        self._index.detach(self.slot)

    # Blocks of requests that this router sends

    def expect(self, keys: Sequence[int]) -> None:
        """Does nothing after close(), when the slot may belong to another worker."""
        if not self._closed:
            self._index.expect(self.slot, keys)

    def stop_expecting(self, keys: Sequence[int]) -> None:
        """Does nothing after close()."""
        if not self._closed:
            self._index.stop_expecting(self.slot, keys)

    def remember(self, chain: Sequence[int]) -> None:
        """Remembers a prompt that the worker has computed."""
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
        """From now on the worker's reports count, and expected blocks of running requests."""
        if self._by_dispatches and not self._closed:
            self._by_dispatches = False
            self._index.trust(self.slot)
            for chain in self._recent:
                self.stop_expecting(chain)

    def rely_on_dispatches(self) -> None:
        """From now on the blocks of recent prompts count, and the worker's reports do not."""
        if not self._by_dispatches and not self._closed:
            self._by_dispatches = True
            self._index.distrust(self.slot)
            for chain in self._recent:
                self.expect(chain)

    @property
    def num_expected(self) -> int:
        """Blocks of running requests, and of recent prompts while these count."""
        return 0 if self._closed else self._index.num_expected(self.slot)
