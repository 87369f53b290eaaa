"""A heap of waiting sequences from which any may leave. The entry of a sequence that has left is dropped when it comes
to the top, or when more than half of the entries are of that kind.
"""

from heapq import heapify, heappop, heappush

from trunkline_worker.cache.sequence import Sequence

# (key, arrival, generation, sequence)
Entry = tuple[float, int, int, Sequence]

FEWEST_VOID = 64  # void entries below which sweeping them out is not worth it


class SequenceHeap:
    """Smallest key first, then the older sequence. An entry is valid while its sequence waits in the generation that it
    had when it was put here.

    members: all waiting sequences, by id
    """

    __slots__ = ("_aside", "_entries", "_members", "_void")

    def __init__(self, members: dict[int, Sequence]) -> None:
        self._members = members
        self._entries: list[Entry] = []
        self._aside: list[Entry] = []
        self._void = 0  # upper bound of the entries that are not valid

    def __len__(self) -> int:
        """Entries in memory, valid or not."""
        return len(self._entries) + len(self._aside)

    def put(self, key: float, sequence: Sequence) -> None:
        """Adds a sequence."""
        heappush(self._entries, (key, sequence.arrival, sequence.generation, sequence))

    def left(self) -> None:
        """Called when a sequence that was put here does not wait any more."""
        self._void += 1
        if self._void >= FEWEST_VOID and 2 * self._void > len(self._entries):
            self._entries = [entry for entry in self._entries if self._is_valid(entry)]
            heapify(self._entries)
            self._void = 0

    def first(self) -> Sequence | None:
        """The first sequence that is not set aside; None if there is none."""
        entry = self.first_entry()
        return None if entry is None else entry[3]

    def first_entry(self) -> Entry | None:
        """The entry of first()."""
        entries = self._entries
        while entries and not self._is_valid(entries[0]):
            heappop(entries)
            self._void -= 1
        return entries[0] if entries else None

    def set_aside(self) -> None:
        """Passes over the first sequence until restore()."""
        assert self.first_entry() is not None, "the heap is empty"
        self._aside.append(heappop(self._entries))

    def restore(self) -> None:
        """Puts all sequences that were set aside back."""
        for entry in self._aside:
            heappush(self._entries, entry)
        self._aside.clear()

    def replace_first(self, key: float) -> None:
        """Gives the first sequence a new key."""
        *_, sequence = heappop(self._entries)
        self.put(key, sequence)

    def _is_valid(self, entry: Entry) -> bool:
        sequence = entry[3]
        return sequence.sequence_id in self._members and entry[2] == sequence.generation
