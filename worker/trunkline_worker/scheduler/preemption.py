"""Which sequence gives up its blocks when the pool runs dry, or when a higher lane needs room, and for which one.

A sequence that is preempted computes again later; until other sequences take its blocks they stay reusable. Between
lanes and within a tenant, only a sequence of lower rank is ever preempted for another one's growth, and ranks never
change, so no two sequences evict one another. Between the tenants of a lane it depends on what they hold: see
lane_sharing.py. An aged sequence (aging.py) keeps what it was promised, and no sequence is evicted from the step that
computes it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from trunkline_worker.cache.blocks import KVBlocks
from trunkline_worker.cache.sequence import Sequence
from trunkline_worker.scheduler.admission import Admission
from trunkline_worker.scheduler.aging import Overdue
from trunkline_worker.scheduler.lane_sharing import LaneSharing
from trunkline_worker.scheduler.running_set import MAX_PREEMPTIONS_PER_STEP, Evictions, RunningSet
from trunkline_worker.scheduler.waiting import Waiting
from trunkline_worker.step.lanes import LANES, Lane


@dataclass(slots=True, eq=False, kw_only=True)
class Preemption:
    """Chooses sequences to preempt."""

    running: RunningSet
    waiting: Waiting
    blocks: KVBlocks
    admission: Admission
    overdue: Overdue
    evictions: Evictions
    sharing: LaneSharing
    # Waiting sequences for which lower lanes gave way, by lane: no lower lane is to share out that room.
    _expected: list[Sequence | None] = field(default_factory=lambda: [None for _ in LANES], init=False)

    def can_grow(self, sequence: Sequence) -> bool:
        """Whether a running sequence can have one more block, after preempting others for it where that is allowed."""
        running = self.running
        while True:
            reserve = self.admission.reserve_for(sequence, running.members)
            if self.blocks.can_grow(1, reserve):
                return True
            if running.is_retiring or not self.evictions.left:
                return False  # blocks will be available soon
            victim = self._victim_of_growth(sequence)
            if victim is None:
                return False  # it keeps what it has and waits until another sequence ends
            self._preempt(victim)

    def _victim_of_growth(self, sequence: Sequence) -> Sequence | None:
        running, spared = self.running.members, self.running.is_settled
        if not self.waiting.lanes[sequence.lane].is_contended:
            return cheapest_victim(running, sequence.rank, lower_lanes_only=False, spared=spared)
        lower = cheapest_victim(running, sequence.rank, lower_lanes_only=True, spared=spared)
        return lower if lower is not None else self.sharing.victim_of_growth(sequence)

    def make_room(self, now_s: float) -> None:
        """Admits waiting sequences that fit only if lower lanes, or tenants that hold more than their share, give way.
        Called before anything else of a step is settled, because a preempted sequence has no part in the step."""
        for lane in LANES:
            if self.waiting.lanes[lane].is_contended:
                self.sharing.share_out(lane, now_s)
                if self.sharing.makes_room_in is not None:
                    return  # lower lanes must not use that room
            elif lane is not Lane.BATCH:
                self._make_way_for(lane, now_s)
                if self._keeps_room(lane, now_s):
                    return

    def _make_way_for(self, lane: Lane, now_s: float) -> None:
        """Admits the next sequences of a lane for which lower lanes have to give way."""
        admission, running, waiting = self.admission, self.running.members, self.waiting
        if not running or running[-1].lane <= lane:
            return  # there is nothing to preempt
        lane_is_overdue = self.overdue.is_overdue(lane, now_s)
        for _ in range(MAX_PREEMPTIONS_PER_STEP):
            sequence = waiting.next(lane)
            if sequence is None:
                break
            if self.running.computes_next_of(sequence):
                waiting.defer(sequence)
                continue
            is_overdue = lane_is_overdue and self.sharing.may_stretch(sequence)
            if admission.fits(sequence, running, is_overdue=is_overdue):
                break  # it is admitted together with all others
            if self._preempt_lower_lanes(sequence, is_overdue=is_overdue):
                self._expected[lane] = sequence
            if not admission.fits(sequence, running, is_overdue=is_overdue):
                break
            self.running.join(sequence, now_s)
            self.sharing.joined(lane)
        waiting.restore()

    def _keeps_room(self, lane: Lane, now_s: float) -> bool:
        """Whether a sequence of a lane waits for which lower lanes gave way, and that fits, or will once the blocks are
        free that steps in flight still write."""
        sequence = self._expected[lane]
        if sequence is None:
            return False
        if sequence.is_ready and not self.running.computes_next_of(sequence):
            is_overdue = self.overdue.is_overdue(lane, now_s) and self.sharing.may_stretch(sequence)
            missing = self.admission.missing_without(
                [],
                sequence,
                self.running.members,
                is_overdue=is_overdue,
                retiring_blocks=self.running.num_retiring_blocks,
            )
            if missing is None:
                return True
        self._expected[lane] = None
        return False

    def _preempt_lower_lanes(self, sequence: Sequence, *, is_overdue: bool) -> bool:
        """Preempts sequences of lower lanes for one that is to be admitted, if that is enough. Returns whether it
        preempted any."""
        admission, evictions, running = self.admission, self.evictions, self.running
        lower = evictions.of_lower_lanes(sequence)
        if (
            not lower
            or running.is_retiring
            or admission.missing_without(lower, sequence, running.members, is_overdue=is_overdue) is not None
        ):
            return False
        left_before = evictions.left
        while (
            evictions.left
            and not running.is_retiring
            and not admission.fits(sequence, running.members, is_overdue=is_overdue)
        ):
            victim = cheapest_victim(running.members, sequence.rank, lower_lanes_only=True, spared=running.is_settled)
            if victim is None:
                break
            self._preempt(victim)
        return evictions.left < left_before

    def _preempt(self, sequence: Sequence) -> None:
        self.evictions.evict(sequence)
        self.sharing.left(sequence)


def cheapest_victim(
    running: Iterable[Sequence],
    beyond: tuple[int, int],
    *,
    lower_lanes_only: bool,
    spared: Callable[[Sequence], bool] = lambda _: False,
) -> Sequence | None:
    """The sequence that gives up its blocks for one of rank `beyond`: of the lowest lane there is, the one with the
    fewest tokens to compute again. Returns None if no sequence may be chosen.

    spared: tells which sequences are not to be chosen
    """
    best: Sequence | None = None
    best_key = (0, 0)
    for sequence in running:
        lane = sequence.lane
        if (lane <= beyond[0]) if lower_lanes_only else (sequence.rank <= beyond):
            continue
        if not sequence.num_own_blocks or sequence.is_aged or spared(sequence):
            continue
        redo = sequence.num_scheduled - sequence.num_reused
        key = (-lane, redo)
        if best is None or key < best_key:
            best, best_key = sequence, key
    return best
