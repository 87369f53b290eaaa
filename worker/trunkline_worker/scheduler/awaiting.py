"""Waiting sequences that await a resource: a grammar being compiled, an adapter or KV blocks being loaded.

Such a sequence waits in the queue like any other: it counts in the bounds of its lane and tenant, it can be aborted,
and it is refused once its deadline is out of reach. But it has no place in the order, so nothing is admitted, aged,
preempted or shared out on its behalf. Once all that it awaits is there, it takes the place that its arrival gives it.
"""

from collections.abc import Mapping

from trunkline_worker.cache.sequence import AwaitedResource, Sequence


class Awaiting:
    """The sequences that await a resource, by resource. `Sequence.awaits` is the same, by sequence."""

    def __init__(self) -> None:
        self._by_resource: dict[AwaitedResource, dict[int, Sequence]] = {}
        self._ids: set[int] = set()

    def of(self, resource: AwaitedResource) -> list[Sequence]:
        """The sequences that await a resource, first the one that has awaited it longest."""
        return list(self._by_resource.get(resource, {}).values())

    def add(self, sequence: Sequence, *more: AwaitedResource) -> None:
        """Adds a sequence with all that it awaits, or what it awaits in addition."""
        sequence.awaits |= set(more)
        self._ids.add(sequence.sequence_id)
        for resource in sequence.awaits:
            self._by_resource.setdefault(resource, {})[sequence.sequence_id] = sequence

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence, which awaits nothing from now on."""
        self._ids.remove(sequence.sequence_id)
        for resource in sequence.awaits:
            found = self._by_resource[resource]
            del found[sequence.sequence_id]
            if not found:
                del self._by_resource[resource]
        sequence.awaits = frozenset()

    def settle(self, resource: AwaitedResource) -> list[Sequence]:
        """The resource is there. Removes and returns the sequences that await nothing else."""
        settled = []
        for sequence in self._by_resource.pop(resource, {}).values():
            sequence.awaits -= {resource}
            if not sequence.awaits:
                self._ids.remove(sequence.sequence_id)
                settled.append(sequence)
        return settled

    def check_integrity(self, members: Mapping[int, Sequence]) -> None:
        """Asserts that resources and sequences name each other.  members: all waiting sequences, by id"""
        awaiting = [sequence for sequence in members.values() if sequence.awaits]
        assert {sequence.sequence_id for sequence in awaiting} == self._ids, (
            "sequences that await a resource miscounted"
        )
        pairs = {(resource, sequence.sequence_id) for sequence in awaiting for resource in sequence.awaits}
        assert pairs == {(resource, one) for resource, found in self._by_resource.items() for one in found}
        assert all(self._by_resource.values()), "a resource is kept that no sequence awaits"
