"""Who gives its blocks up when the pool runs dry, or when a higher lane wants in, and for whom.

A sequence that is preempted computes again later; until they are taken its blocks stay reusable. Between lanes and
within a tenant only what ranks lower is ever preempted for another sequence's growth, and ranks never change, so no two
sequences evict one another. Between the tenants of a lane it goes by what they hold: see lane_sharing.py.
A guest (guest.py) keeps what it was promised, and nobody is evicted from the step that computes it.
"""

from collections.abc import Callable, Iterable

from trunkline_worker.cache.sequence import Sequence
from trunkline_worker.lanes.lanes import LANES, Lane
from trunkline_worker.scheduling.lane_sharing import LaneSharing
from trunkline_worker.scheduling.running_set import RunningSet

# Preempting is a last resort: if more than a few are needed in one step, the rest waits for the next.
MAX_PREEMPTIONS_PER_STEP = 8


class Preemption:
    """What of it happens in one step."""

    def __init__(self, running_set: RunningSet) -> None:
        self._set = running_set
        self.left = MAX_PREEMPTIONS_PER_STEP  # in this step
        self.sharing = LaneSharing(running_set, self)

    @property
    def has_happened(self) -> bool:
        """In this step."""
        return self.left < MAX_PREEMPTIONS_PER_STEP

    def can_grow(self, sequence: Sequence) -> bool:
        """Whether a running sequence can have one more block; sees to it that it can, if another one is to give way."""
        running_set = self._set
        while True:
            reserve = running_set.admission.reserve_for(sequence, running_set.running)
            if running_set.blocks.can_grow(1, reserve):
                return True
            if running_set.is_retiring or not self.left:
                return False  # blocks are on their way
            victim = self._victim_of_growth(sequence)
            if victim is None:
                return False  # it waits, with what it has, until somebody ends
            self.preempt(victim)

    def _victim_of_growth(self, sequence: Sequence) -> Sequence | None:
        running = self._set.running
        if not self._set.waiting.lanes[sequence.lane].is_contended:
            return cheapest_victim(running, sequence.rank, lower_lanes_only=False, spared=self.is_settled)
        lower = cheapest_victim(running, sequence.rank, lower_lanes_only=True, spared=self.is_settled)
        return lower if lower is not None else self.sharing.victim_of_growth(sequence)

    def begin_step(self, now_s: float) -> None:
        """Lets in what waits and does not fit because of lower lanes, or of tenants that hold more than their share.
        Comes before anything else of a step is settled, since whoever is preempted has no part in it."""
        self.left = MAX_PREEMPTIONS_PER_STEP
        running_set, waiting = self._set, self._set.waiting
        self.sharing.begin_step(now_s)
        if not running_set.gate.is_open_always:
            return
        for lane in self.sharing.contended():
            self.sharing.end_stretching(lane)
        if running_set.is_blocked or not len(waiting):
            return
        for lane in LANES:
            if waiting.lanes[lane].is_contended:
                self.sharing.share_out(lane, now_s)
                if self.sharing.makes_room_in is not None:
                    return  # lower lanes must not use that room
            elif lane is not Lane.BATCH:
                self._make_way_for(lane, now_s)

    def _make_way_for(self, lane: Lane, now_s: float) -> None:
        """Lets in those next in a lane for which lower lanes have to give way."""
        running_set, waiting = self._set, self._set.waiting
        admission, running = running_set.admission, running_set.running
        if not running or running[-1].lane <= lane:
            return  # there is nobody to preempt
        hurries = running_set.hurries(lane, now_s)
        for _ in range(MAX_PREEMPTIONS_PER_STEP):
            sequence = waiting.next(lane)
            if sequence is None:
                break
            if running_set.waits_for_prefix(sequence):
                waiting.defer(sequence)
                continue
            may_hurry = hurries and self.sharing.may_stretch(sequence)
            if admission.fits(sequence, running, hurries=may_hurry):
                break  # it is let in with all others
            self._make_room(sequence, hurries=may_hurry)
            if not admission.fits(sequence, running, hurries=may_hurry):
                break
            running_set.join(sequence, now_s)
            self.sharing.joined(lane)
        waiting.restore()

    def _make_room(self, sequence: Sequence, *, hurries: bool) -> None:
        """Preempts sequences of lower lanes for one that is to be admitted, if that is enough."""
        running_set, admission, running = self._set, self._set.admission, self._set.running
        lower = self.of_lower_lanes(sequence)
        if (
            not lower
            or running_set.is_retiring
            or not admission.would_fit_without(lower, sequence, running, hurries=hurries)
        ):
            return
        while self.left and not running_set.is_retiring and not admission.fits(sequence, running, hurries=hurries):
            victim = cheapest_victim(running, sequence.rank, lower_lanes_only=True, spared=self.is_settled)
            if victim is None:
                return
            self.preempt(victim)

    def of_lower_lanes(self, sequence: Sequence) -> list[Sequence]:
        """Running sequences of lower lanes that may be preempted for one."""
        running = self._set.running
        return [s for s in running if s.lane > sequence.lane and not s.is_guest and not self.is_settled(s)]

    def preempt(self, sequence: Sequence) -> None:
        """Takes a running sequence's blocks and puts it back into the queue."""
        self.left -= 1
        self._set.stats.preempted(sequence.num_scheduled)
        sequence.num_charged = max(sequence.num_charged, sequence.num_scheduled)
        self._set.leave(sequence)
        sequence.generation += 1
        sequence.promised_len = 0
        self._set.waiting.put_back(sequence)
        self.sharing.left(sequence)

    def is_settled(self, sequence: Sequence) -> bool:
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
