"""What long waiting changes: a lane's sequences may make steps longer (Overdue), or go before every lane (Aging).

When a sequence has waited in a lower lane for `aging_s`, and no sequence of that lane was admitted all that time, the
next one of the lane is aged. An aged sequence goes before every lane and keeps its blocks until it has advanced by
`aged_tokens`, whichever sequence wants them. So a sequence that is k-th in the order of its lane and has n output
tokens needs at most k + ceil(n / aged_tokens) turns, each of aging_s and the time that an aged sequence runs, whatever
the lanes above it do.
"""

from trunkline_worker.cache.sequence import Sequence
from trunkline_worker.scheduler.admission import Admission
from trunkline_worker.scheduler.limits import SchedulerLimits
from trunkline_worker.scheduler.running_set import RunningSet
from trunkline_worker.scheduler.waiting import Waiting
from trunkline_worker.step.lanes import Lane

# After waiting this many target times, the sequences of a lane may stretch steps: a first token that is later still is
# worse than a slower pace of the others.
OVERDUE_TARGETS = 5.0
LOWER_LANES = (Lane.STANDARD, Lane.BATCH)


class Overdue:
    """Lanes in which a sequence has waited for so long that others' pace counts less.

    Goes by the oldest sequence of a lane, and lets the next one go, whichever it is.

    By the age of the next one alone, a tenant that aborts its requests and sends them again could hold up a lane.
    """

    def __init__(self, waiting: Waiting, itl_target_s: float) -> None:
        self._waiting = waiting
        self._itl_target_s = itl_target_s
        self._patience_s = OVERDUE_TARGETS * itl_target_s

    def is_overdue(self, lane: Lane, now_s: float) -> bool:
        """Whether a sequence of the lane has waited for too long, for whatever reason."""
        oldest_s = self._waiting.oldest_s(lane)
        return oldest_s is not None and now_s >= oldest_s + self._patience_s

    def next_s(self, after_s: float) -> float | None:
        """The first time after `after_s` at which the interactive or standard lane becomes overdue; None: neither does.
        The batch lane never stretches steps."""
        if not self._itl_target_s:
            return None
        oldest_s = [self._waiting.oldest_s(lane) for lane in (Lane.INTERACTIVE, Lane.STANDARD)]
        times_s = [time_s + self._patience_s for time_s in oldest_s if time_s is not None]
        return min([time_s for time_s in times_s if time_s > after_s], default=None)


class Aging:
    """Finds the aged sequence of a step, and admits it."""

    def __init__(self, limits: SchedulerLimits, running: RunningSet, waiting: Waiting, admission: Admission) -> None:
        self._limits = limits
        self._running = running
        self._waiting = waiting
        self._admission = admission
        self.latest: Sequence | None = None  # others only read it
        self._blocked_at = -1  # RunningSet.changes when the next aged sequence was found not to fit

    @property
    def is_blocked(self) -> bool:
        """Whether an aged sequence waits that does not fit, and nothing has changed since that was found out."""
        return self._blocked_at == self._running.changes

    def current(self) -> Sequence | None:
        """The aged sequence that runs; None: there is none."""
        aged = self.latest
        return aged if aged is not None and aged.block_table and aged.is_aged else None

    def end_if_over(self) -> None:
        """Called before each step."""
        if self.latest is not None and self.current() is None:
            self.latest = None
            self._running.note_change()  # its blocks are no longer promised

    def next_s(self) -> float | None:
        """When a waiting sequence becomes aged; None: none does while nothing else changes."""
        if self.is_blocked or self.current() is not None:
            return None
        since_s = [self._waiting.neglected_since_s(lane) for lane in LOWER_LANES]
        return min([time_s + self._limits.aging_s for time_s in since_s if time_s is not None], default=None)

    def find(self, chunks: list[Sequence], now_s: float) -> Sequence | None:
        """The sequence whose prompt goes before all others in this step because of its age; None: there is none.

        chunks: running sequences whose prompts have been begun
        """
        aged = self.current()
        if aged is not None:
            return aged if aged in chunks else None
        aged_s = now_s - self._limits.aging_s
        for sequence in chunks:
            if sequence.lane is not Lane.INTERACTIVE and (sequence.admitted_s or 0.0) <= aged_s:
                # What it holds is all that can be promised without taking blocks from others.
                self.latest, sequence.promised_len = sequence, len(sequence.token_ids)
                return sequence
        for lane in () if self.is_blocked else LOWER_LANES:
            since_s = self._waiting.neglected_since_s(lane)
            if since_s is None or since_s > aged_s:
                continue
            following = self._waiting.next(lane)
            if following and not self._running.computes_next_of(following):
                return following
            # Otherwise a running sequence is computing its prefix.
        return None

    def admit(self, aged: Sequence, now_s: float) -> bool:
        """Moves a waiting sequence into the running set. Returns False if it does not fit."""
        promised_len = len(aged.token_ids) + self._limits.aged_tokens
        aged.promised_len = min(promised_len, aged.last_to_compute + 1)
        if not self._admission.fits(aged, self._running.members, is_overdue=False):
            aged.promised_len = 0
            if not self._running.is_retiring:
                self._blocked_at = self._running.changes
            return False
        self._running.join(aged, now_s)
        self.latest = aged
        return True

    def check_integrity(self) -> None:
        """Asserts that at most one running sequence is aged."""
        assert sum(sequence.is_aged for sequence in self._running.members) <= 1, "one aged sequence at a time"
