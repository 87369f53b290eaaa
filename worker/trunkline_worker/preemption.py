"""Who gives its blocks up when the pool runs dry, and for whom.

A sequence that is preempted computes again later; until they are taken its blocks stay reusable. The highest rank
always gets on: only what ranks lower is ever preempted, and ranks never change, so no two sequences evict one another.
A guest (guest.py) keeps what it was promised, and nobody is evicted from the step that computes it.
"""

from collections.abc import Callable, Iterable

from trunkline_worker.lanes import Lane
from trunkline_worker.running_set import RunningSet
from trunkline_worker.sequence import Sequence

# Preempting is a last resort: if more than a few are needed in one step, the rest waits for the next.
MAX_PREEMPTIONS_PER_STEP = 8


class Preemption:
    """What of it happens in one step."""

    def __init__(self, running_set: RunningSet) -> None:
        self._set = running_set
        self._left = MAX_PREEMPTIONS_PER_STEP

    @property
    def has_happened(self) -> bool:
        """In this step."""
        return self._left < MAX_PREEMPTIONS_PER_STEP

    def can_grow(self, sequence: Sequence) -> bool:
        """Whether a running sequence can have one more block; sees to it that it can, if somebody ranks lower."""
        running_set = self._set
        while True:
            reserve = running_set.admission.reserve_for(sequence, running_set.running)
            if running_set.blocks.can_grow(1, reserve):
                return True
            if running_set.is_retiring or not self._left:
                return False  # blocks are on their way
            victim = cheapest_victim(
                running_set.running, sequence.rank, lower_lanes_only=False, spared=self._is_settled
            )
            if victim is None:
                return False  # it waits, with what it has, until somebody ends
            self._preempt(victim)

    def begin_step(self, now_s: float) -> None:
        """Lets in what waits in a higher lane and does not fit because of lower ones. Comes before anything else of a
        step is settled, since whoever is preempted has no part in it."""
        self._left = MAX_PREEMPTIONS_PER_STEP
        running_set, waiting = self._set, self._set.waiting
        if running_set.is_blocked or not running_set.gate.is_open_always or not len(waiting):
            return
        admission, running = running_set.admission, running_set.running
        for lane in (Lane.INTERACTIVE, Lane.STANDARD):
            hurries = running_set.hurries(lane, now_s)
            for _ in range(MAX_PREEMPTIONS_PER_STEP):
                sequence = waiting.next(lane)
                if sequence is None:
                    break  # on to the next lane
                if running_set.waits_for_prefix(sequence):
                    waiting.defer(sequence)
                    continue
                if not running or running[-1].lane <= lane or admission.fits(sequence, running, hurries=hurries):
                    break  # there is nobody to preempt, or it is let in with all others
                self._make_room(sequence, hurries=hurries)
                if not admission.fits(sequence, running, hurries=hurries):
                    break
                running_set.join(sequence, now_s)
        waiting.restore()

    def _make_room(self, sequence: Sequence, *, hurries: bool) -> None:
        """Preempts sequences of lower lanes for one that is to be admitted, if that is enough."""
        running_set, admission, running = self._set, self._set.admission, self._set.running
        lower = [s for s in running if s.lane > sequence.lane and not s.is_guest and not self._is_settled(s)]
        if (
            not lower
            or running_set.is_retiring
            or not admission.would_fit_without(lower, sequence, running, hurries=hurries)
        ):
            return
        while self._left and not running_set.is_retiring and not admission.fits(sequence, running, hurries=hurries):
            victim = cheapest_victim(running, sequence.rank, lower_lanes_only=True, spared=self._is_settled)
            if victim is None:
                return
            self._preempt(victim)

    def _preempt(self, sequence: Sequence) -> None:
        """Takes a running sequence's blocks and puts it back into the queue."""
        self._left -= 1
        self._set.stats.preempted(sequence.num_scheduled)
        self._set.leave(sequence)
        sequence.generation += 1
        sequence.promised_len = 0
        self._set.waiting.put_back(sequence)

    def _is_settled(self, sequence: Sequence) -> bool:
        """Whether it has a part in the step that is being planned, or has just been let in."""
        return sequence.last_step > self._set.step_id or sequence.sequence_id in self._set.starts


def cheapest_victim(
    running: Iterable[Sequence],
    beyond: tuple[int, int],
    *,
    lower_lanes_only: bool,
    spared: Callable[[Sequence], bool] = lambda _: False,
) -> Sequence | None:
    """Who gives its blocks up for one of rank `beyond`: of the lowest lane there is, the one with least to compute
    again.

    spared: who is not to be chosen
    """
    best: Sequence | None = None
    best_key = (0, 0)
    for sequence in running:
        lane = sequence.lane
        if (lane <= beyond[0]) if lower_lanes_only else (sequence.rank <= beyond):
            continue
        if not sequence.num_own_blocks or sequence.is_guest or spared(sequence):
            continue
        redo = sequence.num_scheduled - sequence.num_reused
        key = (-lane, redo)
        if best is None or key < best_key:
            best, best_key = sequence, key
    return best
