"""Prompts of one lane that are partly computed, in the order in which they continue."""

from collections import deque
from collections.abc import Iterable

from trunkline_worker.cache.sequence import Sequence
from trunkline_worker.lanes.fair_share import Account


class BegunPrompts:
    """The tenant with the least service goes first, and within a tenant the oldest prompt."""

    def __init__(self, sequences: Iterable[Sequence]) -> None:
        """sequences: by rank"""
        self._by_account: dict[Account, deque[Sequence]] = {}
        for sequence in sequences:
            self._by_account.setdefault(sequence.account, deque()).append(sequence)

    def first(self) -> Sequence | None:
        """The prompt that continues next; None if there is none left."""
        if not self._by_account:
            return None
        account = min(self._by_account, key=lambda account: account.virtual_tokens)
        return self._by_account[account][0]

    def remove(self, sequence: Sequence) -> None:
        """Removes the first prompt, which has had its turn."""
        prompts = self._by_account[sequence.account]
        assert prompts.popleft() is sequence, "only the first prompt of a tenant can have its turn"
        if not prompts:
            del self._by_account[sequence.account]
