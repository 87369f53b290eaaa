"""Whose turn it is because of its age.

When something has waited in a lower lane for `aging_s`, and nobody of that lane was admitted all that time, the next
one of it is a guest. A guest goes before every lane, and keeps its blocks until it has got guest_tokens further,
whoever wants them; there is one at a time. So a sequence that is k-th in the order of its lane and has n output tokens
needs at most k + ceil(n / guest_tokens) turns, each of aging_s and a guest's time, whatever the lanes above it do.
"""

from trunkline_worker.cache.sequence import Sequence
from trunkline_worker.lanes.lanes import Lane
from trunkline_worker.scheduling.running_set import RunningSet

LOWER_LANES = (Lane.STANDARD, Lane.BATCH)


class GuestTurn:
    """Finds the guest of a step, and lets it in."""

    def __init__(self, running_set: RunningSet) -> None:
        self._set = running_set
        self._latest: Sequence | None = None

    def current(self) -> Sequence | None:
        """The guest that runs."""
        guest = self._latest
        return guest if guest is not None and guest.block_table and guest.is_guest else None

    def end_if_over(self) -> None:
        """Called before each step."""
        if self._latest is not None and self.current() is None:
            self._latest = None
            self._set.something_changed()  # what it held can be had now

    def steps_left(self) -> int | None:
        """In how many steps of one token each the latest guest has got what it was promised, and others may take its
        place; None: nobody is kept from one."""
        guest = self._latest
        return None if guest is None or not guest.block_table else guest.promised_len - guest.num_scheduled + 1

    def next_s(self) -> float | None:
        """When age makes somebody who waits a guest; None: it does not."""
        if self._set.is_guest_blocked or self.current() is not None:
            return None
        since_s = [self._set.waiting.neglected_since_s(lane) for lane in LOWER_LANES]
        return min([time_s + self._set.limits.aging_s for time_s in since_s if time_s is not None], default=None)

    def find(self, chunks: list[Sequence], now_s: float) -> Sequence | None:
        """The sequence whose prompt goes before all others in this step because of its age."""
        running_set = self._set
        if not running_set.gate.is_open_always:
            return None
        guest = self.current()
        if guest is not None:
            return guest if guest in chunks else None
        aged_s = now_s - running_set.limits.aging_s
        for sequence in chunks:
            if sequence.lane is not Lane.INTERACTIVE and (sequence.admitted_s or 0.0) <= aged_s:
                # What it has is all that can be promised without taking from others.
                self._latest, sequence.promised_len = sequence, len(sequence.token_ids)
                return sequence
        waiting = running_set.waiting
        for lane in () if running_set.is_guest_blocked else LOWER_LANES:
            since_s = waiting.neglected_since_s(lane)
            if since_s is None or since_s > aged_s:
                continue
            following = waiting.next(lane)
            if following and not running_set.waits_for_prefix(following):
                return following
            # Otherwise somebody who runs is computing for it.
        return None

    def let_in(self, guest: Sequence, now_s: float) -> bool:
        """Takes one that waits into the running set, if it fits."""
        running_set = self._set
        promised_len = len(guest.token_ids) + running_set.limits.guest_tokens
        guest.promised_len = min(promised_len, guest.last_to_compute + 1)
        if not running_set.admission.fits(guest, running_set.running, hurries=False):
            guest.promised_len = 0
            running_set.is_guest_blocked = not running_set.is_retiring
            return False
        running_set.join(guest, now_s)
        self._latest = guest
        return True

    def check_integrity(self) -> None:
        """Asserts that there is one at a time."""
        assert sum(sequence.is_guest for sequence in self._set.running) <= 1, "one guest at a time"
