"""Which workers hold which blocks, according to their events. Pure: no I/O, no clock.

Each block has one integer whose bits are the workers that hold it, so one search serves a whole fleet. The index is a
hint: it keeps only KEY_BITS of a digest, and an error means only that a worker computes a prefix that another one had.
"""

from array import array
from collections import deque
from collections.abc import Sequence
from struct import unpack

KEY_BITS = 60  # an int of two digits in CPython: 32 bytes
SHIFT = 64 - KEY_BITS
# Small tables: growing or sweeping one takes little time.
SHARDS = 1024
MOST_SHARED_MASKS = 1 << 16
# Recent prompts that are remembered for each worker, and count while its reports do not.
MOST_RECENT_PROMPTS = 256
MOST_RECENT_BLOCKS = 1 << 14  # of 8 bytes each


def keys_of(digests: bytes) -> list[int]:
    """Returns the index keys of concatenated digests."""
    halves = unpack(f">{len(digests) // 8}Q", digests)
    return [half >> SHIFT for half in halves[::2]]


class PrefixIndex:
    """The blocks of any number of workers. Each worker has a slot, the number of its bit; see attach()."""

    def __init__(self) -> None:
        self._shards: list[dict[int, int]] = [{} for _ in range(SHARDS)]  # key → bits of the workers that hold it
        self._masks: dict[int, int] = {}  # equal masks are one object
        self._expected: dict[int, int] = {}  # key → bits of the workers that are about to hold it
        self._expecting: dict[int, dict[int, int]] = {}  # by slot: key → how many requests expect it
        self._free: list[int] = []  # unused slots
        self._num_slots = 0
        self._retired: dict[int, int] = {}  # slots of lost workers → shards still to be swept
        self._cursor = 0  # the next shard to be swept
        self._distrusted = 0  # bits of the workers whose reports do not count
        self.num_held: dict[int, int] = {}  # by slot: blocks

    def attach(self) -> int:
        """Returns a slot for a worker that holds nothing yet."""
        if self._free:
            slot = self._free.pop()
        else:
            slot, self._num_slots = self._num_slots, self._num_slots + 1
        self.num_held[slot] = 0
        self._expecting[slot] = {}
        return slot

    def detach(self, slot: int) -> None:
        """Removes a worker at once. Calls of sweep() free its blocks step by step."""
        self.trust(slot)
        self._forget_expected(slot)
        if self.num_held.pop(slot):
            self._retired[slot] = SHARDS
        else:
            self._free.append(slot)

    def store(self, slot: int, keys: Sequence[int]) -> None:
        """Records that a worker holds these blocks."""
        bit, shards, masks, fresh = 1 << slot, self._shards, self._masks, 0
        for key in keys:
            shard = shards[key % SHARDS]
            mask = shard.get(key, 0)
            if not mask & bit:
                mask |= bit
                shard[key] = masks.setdefault(mask, mask)
                fresh += 1
        self.num_held[slot] += fresh
        if len(masks) > MOST_SHARED_MASKS:
            masks.clear()
        if self._retired:
            self.sweep()

    def remove(self, slot: int, keys: Sequence[int]) -> None:
        """Records that a worker no longer holds these blocks."""
        bit, shards, masks, gone = 1 << slot, self._shards, self._masks, 0
        for key in keys:
            shard = shards[key % SHARDS]
            mask = shard.get(key, 0)
            if mask & bit:
                gone += 1
                if mask == bit:
                    del shard[key]
                else:
                    mask ^= bit
                    shard[key] = masks.setdefault(mask, mask)
        self.num_held[slot] -= gone

    def sweep(self) -> bool:
        """Frees a slice of the blocks of lost workers. Returns whether more are left."""
        if not self._retired:
            return False
        gone = 0
        for slot in self._retired:
            gone |= 1 << slot
        shard = self._shards[self._cursor]
        self._cursor = (self._cursor + 1) % SHARDS
        touched = [(key, mask) for key, mask in shard.items() if mask & gone]
        for key, mask in touched:
            left = mask & ~gone
            if left:
                shard[key] = self._masks.setdefault(left, left)
            else:
                del shard[key]
        for slot in list(self._retired):
            self._retired[slot] -= 1
            if not self._retired[slot]:
                del self._retired[slot]
                self._free.append(slot)
        return bool(self._retired)

    def distrust(self, slot: int) -> None:
        """Ignores a worker's reported blocks until trust(); they are kept, and its expected blocks still count."""
        self._distrusted |= 1 << slot

    def trust(self, slot: int) -> None:
        self._distrusted &= ~(1 << slot)

    # Expected blocks: prompts of requests that were just sent to a worker

    def expect(self, slot: int, keys: Sequence[int]) -> None:
        """Counts these blocks as held by the worker until stop_expecting()."""
        bit, counts, expected = 1 << slot, self._expecting[slot], self._expected
        for key in keys:
            count = counts.get(key, 0)
            counts[key] = count + 1
            if not count:
                expected[key] = expected.get(key, 0) | bit

    def stop_expecting(self, slot: int, keys: Sequence[int]) -> None:
        bit, counts, expected = 1 << slot, self._expecting[slot], self._expected
        for key in keys:
            left = counts[key] - 1
            if left:
                counts[key] = left
                continue
            del counts[key]
            mask = expected[key] ^ bit
            if mask:
                expected[key] = mask
            else:
                del expected[key]

    def num_expected(self, slot: int) -> int:
        """Returns how many blocks a worker is expected to hold."""
        return len(self._expecting[slot])

    def move_expected(self, slot: int, to: int) -> None:
        """Moves the expected blocks of one slot to another, which must have none."""
        assert not self._expecting[to], "the other slot is in use"
        bit = 1 << to
        for key in self._expecting[slot]:
            self._expected[key] |= bit
        self._expecting[to] = self._expecting[slot].copy()
        self._forget_expected(slot)
        self._expecting[slot] = {}

    def _forget_expected(self, slot: int) -> None:
        bit, expected = 1 << slot, self._expected
        for key in self._expecting.pop(slot):
            mask = expected[key] ^ bit
            if mask:
                expected[key] = mask
            else:
                del expected[key]

    # Blocks per worker

    @property
    def num_slots(self) -> int:
        """All slots are below this."""
        return self._num_slots

    def holders(self, key: int) -> int:
        """Returns the bits of the workers that report to hold a block."""
        return self._shards[key % SHARDS].get(key, 0)

    def reported(self, slot: int, chain: Sequence[int]) -> int:
        """Returns how many leading blocks of a chain a worker reports to hold, whether or not its reports count."""
        bit, shards = 1 << slot, self._shards
        low, high = 0, len(chain)
        while low < high:
            middle = (low + high) // 2
            key = chain[middle]
            if shards[key % SHARDS].get(key, 0) & bit:
                low = middle + 1
            else:
                high = middle
        return low

    def match(self, chain: Sequence[int], among: int) -> list[tuple[int, int]]:
        """Returns how many leading blocks of a chain each worker holds: (count, bits of the workers with that count).

        among: bits of the workers to look for; each of them is in the result once

        The blocks of a worker are prefix-closed, so bisection finds the first missing one. One probe answers for all
        workers, and the search splits only where they differ. Between the events of one step a cache may not be
        prefix-closed for a moment; the result is then inexact, which is harmless.
        """
        shards, expected, trusted = self._shards, self._expected, among & ~self._distrusted
        found: list[tuple[int, int]] = []
        open_: list[tuple[int, int, int]] = [(0, len(chain), among)]
        while open_:
            low, high, mask = open_.pop()
            while low < high and mask:
                middle = (low + high) // 2
                key = chain[middle]
                holders = shards[key % SHARDS].get(key, 0) & trusted
                if expected:
                    holders |= expected.get(key, 0)
                holders &= mask
                if holders == mask:
                    low = middle + 1
                elif holders:
                    open_.append((middle + 1, high, holders))
                    mask ^= holders
                    high = middle
                else:
                    high = middle
            if mask:
                found.append((low, mask))
        return found

    def check_integrity(self) -> None:
        """Asserts that the counts agree with the bits, and that all bits belong to known workers."""
        known = 0
        for slot in (*self.num_held, *self._retired):
            known |= 1 << slot
        held = dict.fromkeys(self.num_held, 0)
        for number, shard in enumerate(self._shards):
            for key, mask in shard.items():
                assert key % SHARDS == number, "a block is in another's shard"
                assert mask, "a block that no worker holds is kept"
                assert not mask & ~known, "a block is held by a worker that is not there"
                for slot in held:
                    held[slot] += mask >> slot & 1
        assert held == self.num_held, "blocks miscounted"
        assert not set(self._free) & (set(self.num_held) | set(self._retired)), "a slot is taken and free"
        expected: dict[int, int] = {}
        assert set(self._expecting) == set(self.num_held), "blocks are expected of a worker that is not there"
        for slot, counts in self._expecting.items():
            for key, count in counts.items():
                assert count > 0, "a block is expected by no request"
                expected[key] = expected.get(key, 0) | 1 << slot
        assert expected == self._expected, "expected blocks miscounted"


class WorkerBlocks:
    """The keys of blocks that one worker holds or is expected to hold.

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
