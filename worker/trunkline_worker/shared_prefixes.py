"""Prefixes that are just being computed: sequences that share one wait for it instead of computing it again."""

from collections import Counter
from collections.abc import Iterable

from trunkline_worker.blocks import KVBlocks
from trunkline_worker.sequence import Sequence


class ComputingPrefixes:
    """Digests of the full blocks that running sequences are about to compute."""

    def __init__(self, blocks: KVBlocks) -> None:
        self._blocks = blocks
        self._computing: dict[bytes, int] = {}  # digest → how many are about to compute it

    def covers_next(self, sequence: Sequence, num_matched: int) -> bool:
        """Whether a running sequence is about to compute the first block that this one misses."""
        if not self._computing or not sequence.may_use_cache:
            return False
        if (num_matched + 1) * self._blocks.block_size >= len(sequence.token_ids):
            return False
        return self._blocks.digest(sequence, num_matched) in self._computing

    def announce(self, sequence: Sequence) -> None:
        """A newly admitted sequence will compute the rest of its full blocks."""
        first = sequence.num_computed // self._blocks.block_size
        sequence.num_announced = len(sequence.token_ids) // self._blocks.block_size
        for index in range(first, sequence.num_announced):
            digest = self._blocks.digest(sequence, index)
            self._computing[digest] = self._computing.get(digest, 0) + 1

    def withdraw(self, sequence: Sequence, until: int | None = None) -> None:
        """Takes announced blocks back: those before block `until`, or all that are left."""
        first = sequence.num_computed // self._blocks.block_size
        last = sequence.num_announced if until is None else min(until, sequence.num_announced)
        for index in range(first, last):
            digest = sequence.digests[index]
            if self._computing[digest] == 1:
                del self._computing[digest]
            else:
                self._computing[digest] -= 1

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Asserts that exactly what running sequences still announce is there."""
        announced = Counter(
            sequence.digests[index]
            for sequence in running
            for index in range(sequence.num_computed // self._blocks.block_size, sequence.num_announced)
        )
        assert self._computing == announced, "blocks being computed miscounted"
