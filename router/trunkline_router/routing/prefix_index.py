"""Which workers hold which blocks, according to their events. Pure: no I/O, no clock.

Each block has one integer whose bits are the workers that hold it, so one search serves a whole fleet. The index is a
hint: it keeps only KEY_BITS of a digest, and an error means only that a worker computes a prefix that another one had.
"""

from collections.abc import Iterable, Sequence
from struct import unpack

KEY_BITS = 60  # an int of two digits in CPython: 32 bytes
SHIFT = 64 - KEY_BITS
# Small tables: growing or sweeping one takes little time.
SHARDS = 1024
MOST_SHARED_MASKS = 1 << 16


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
        self.num_slots = 0  # all slots are below this
        self._retired: dict[int, int] = {}  # slots of lost workers → shards still to be swept
        self._cursor = 0  # the next shard to be swept
        self._distrusted = 0  # bits of the workers whose reports do not count
        self.num_held: dict[int, int] = {}  # by slot: blocks

    def attach(self) -> int:
        """Returns a slot for a worker that holds nothing yet."""
        if self._free:
            slot = self._free.pop()
        else:
            slot, self.num_slots = self.num_slots, self.num_slots + 1
        self.num_held[slot] = 0
        self._expecting[slot] = {}
        return slot

    def renew(self, slot: int) -> int:
        """Forgets at once what a worker has reported. Returns its new slot, where its expected blocks still count."""
        new = self.attach()
        self._expecting[new] = counts = self._expecting[slot].copy()
        for key in counts:
            self._expected[key] |= 1 << new
        if self._distrusted >> slot & 1:
            self.distrust(new)
        self.detach(slot)
        return new

    def detach(self, slot: int) -> None:
        """Removes a worker at once. Calls of sweep() free its blocks step by step."""
        self.trust(slot)
        self._unexpect(self._expecting.pop(slot), 1 << slot)
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
        counts, gone = self._expecting[slot], []
        for key in keys:
            counts[key] -= 1
            if not counts[key]:
                del counts[key]
                gone.append(key)
        self._unexpect(gone, 1 << slot)

    def _unexpect(self, keys: Iterable[int], bit: int) -> None:
        expected = self._expected
        for key in keys:
            mask = expected[key] ^ bit
            if mask:
                expected[key] = mask
            else:
                del expected[key]

    # Blocks per worker

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


class WorkerBlocks:
    """The keys of blocks that one worker holds or is expected to hold.

    Expected blocks are those of the prompts of running requests that this router has sent there: so a burst with one
    prefix stays together before the worker reports its blocks.
    """

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self.slot = index.attach()
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

    def clear(self) -> None:
        """Forgets the reported blocks at once; calls of sweep() free them. Expected blocks stay."""
        if len(self):
            self.slot = self._index.renew(self.slot)

    def sweep(self) -> bool:
        """See PrefixIndex.sweep()."""
        return self._index.sweep()

    def close(self) -> None:
        """The worker is lost: forgets all of its blocks. Requests that end after it change nothing: the slot may belong
        to another worker."""
        self._closed = True
        self._index.detach(self.slot)

    @property
    def is_closed(self) -> bool:
        return self._closed

    def reported(self, chain: Sequence[int]) -> int:
        """Returns how many leading blocks of a chain the worker reports to hold."""
        return 0 if self._closed else self._index.reported(self.slot, chain)

    def expect(self, keys: Sequence[int]) -> None:
        """Counts these blocks of a request that this router sends there, until stop_expecting()."""
        if not self._closed:
            self._index.expect(self.slot, keys)

    def stop_expecting(self, keys: Sequence[int]) -> None:
        if not self._closed:
            self._index.stop_expecting(self.slot, keys)

    def count_reports(self, *, count: bool) -> None:
        """Whether the worker's reports count from now on. While they do not, only its expected blocks do."""
        if not self._closed:
            (self._index.trust if count else self._index.distrust)(self.slot)
