"""A heap of waiting sequences from which any may leave: what left is dropped when it comes to the top, or when there is
more of it than of what is left.
"""

from heapq import heapify, heappop, heappush

from trunkline_worker.cache.sequence import Sequence

# (what counts, arrival, generation, sequence)
Entry = tuple[float, int, int, Sequence]

FEWEST_VOID = 64  # below, sweeping them out is not worth it


class SequenceHeap:
    """Smallest key first, then the older. `members`: who waits, by id; an entry counts as long as its sequence waits in
    the generation in which it was put here.
    """

    __slots__ = ("_aside", "_entries", "_members", "_void")

    def __init__(self, members: dict[int, Sequence]) -> None:
        self._members = members
        self._entries: list[Entry] = []
        self._aside: list[Entry] = []
        self._void = 0  # most entries that do not count

    def __len__(self) -> int:
        """Entries that are kept, whether they count or not."""
        return len(self._entries) + len(self._aside)

    def put(self, key: float, sequence: Sequence) -> None:
        heappush(self._entries, (key, sequence.arrival, sequence.generation, sequence))

    def left(self) -> None:
        """A sequence that was put here does not wait any more."""
        self._void += 1
        if self._void >= FEWEST_VOID and 2 * self._void > len(self._entries):
            self._entries = [entry for entry in self._entries if self._counts(entry)]
            heapify(self._entries)
            self._void = 0

    def first(self) -> Sequence | None:
        """The first one that is not set aside."""
        entry = self.first_entry()
        return None if entry is None else entry[3]

    def first_entry(self) -> Entry | None:
        entries = self._entries
        while entries and not self._counts(entries[0]):
            heappop(entries)
            self._void -= 1
        return entries[0] if entries else None

    def set_aside(self) -> None:
        """The first one is not looked at before restore()."""
        assert self.first_entry() is not None, "nobody is first"
        self._aside.append(heappop(self._entries))

    def restore(self) -> None:
        """Everyone counts again."""
        for entry in self._aside:
            heappush(self._entries, entry)
        self._aside.clear()

    def replace_first(self, key: float) -> None:
        """Moves the first one to where this key belongs."""
        *_, sequence = heappop(self._entries)
        self.put(key, sequence)

    def _counts(self, entry: Entry) -> bool:
        sequence = entry[3]
        return sequence.sequence_id in self._members and entry[2] == sequence.generation
