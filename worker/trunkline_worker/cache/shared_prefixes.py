"""Prefixes that are being computed: sequences that share one wait for it instead of computing it again.

A sequence never waits for one of a lower lane, which may be held up by everything that goes before it.
"""

from collections import Counter
from collections.abc import Iterable

from trunkline_worker.cache.blocks import KVBlocks
from trunkline_worker.cache.sequence import Sequence
from trunkline_worker.lanes.lanes import LANES


class ComputingPrefixes:
    """Digests of the full blocks that running sequences are about to compute."""

    def __init__(self, blocks: KVBlocks) -> None:
        self._blocks = blocks
        self._computing: dict[bytes, list[int]] = {}  # digest → sequences about to compute it, by lane

    def covers_next(self, sequence: Sequence, num_matched: int) -> bool:
        """Whether a running sequence of the same or a higher lane is about to compute the first missing block."""
        if not self._computing or not sequence.may_use_cache:
            return False
        if (num_matched + 1) * self._blocks.block_size >= len(sequence.token_ids):
            return False
        computing = self._computing.get(self._blocks.digest(sequence, num_matched))
        return computing is not None and any(computing[: sequence.lane + 1])

    def announce(self, sequence: Sequence) -> None:
        """Announces that a newly admitted sequence will compute the rest of its full blocks."""
        first = sequence.num_computed // self._blocks.block_size
        sequence.num_announced = len(sequence.token_ids) // self._blocks.block_size
        for index in range(first, sequence.num_announced):
            digest = self._blocks.digest(sequence, index)
            self._computing.setdefault(digest, [0 for _ in LANES])[sequence.lane] += 1

    def withdraw(self, sequence: Sequence, until: int | None = None) -> None:
        """Withdraws announced blocks: those before block `until`, or all that are left."""
        first = sequence.num_computed // self._blocks.block_size
        last = sequence.num_announced if until is None else min(until, sequence.num_announced)
        for index in range(first, last):
            digest = sequence.digests[index]
            computing = self._computing[digest]
            computing[sequence.lane] -= 1
            if not any(computing):
                del self._computing[digest]

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Asserts that exactly the blocks announced by running sequences are counted."""
        announced = Counter(
            (sequence.digests[index], sequence.lane)
            for sequence in running
            for index in range(sequence.num_computed // self._blocks.block_size, sequence.num_announced)
        )
        counted = {(digest, lane): n for digest, lanes in self._computing.items() for lane, n in enumerate(lanes) if n}
        assert counted == announced, "blocks being computed miscounted"
