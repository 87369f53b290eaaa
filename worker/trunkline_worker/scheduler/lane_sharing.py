"""How the tenants of a lane share places, KV blocks and the time of a step; docs/fairness.md has the bounds.

Where everything fits, these rules have no effect: a tenant alone uses all there is. Where a tenant's next sequence does
not fit, running sequences of a tenant that holds more give way, by shares.may_take(). Each preemption lowers the
highest of the levels concerned. A sequence that gave way gets a token before it gives way again, so preemptions come to
an end even where levels change while sequences grow.
"""

from collections.abc import Callable, Iterator

from trunkline_worker.cache.blocks import KVBlocks
from trunkline_worker.cache.sequence import Sequence
from trunkline_worker.lanes.fair_share import Account
from trunkline_worker.lanes.lanes import LANES, Lane
from trunkline_worker.scheduler.admission import Admission
from trunkline_worker.scheduler.aging import Overdue
from trunkline_worker.scheduler.limits import SchedulerLimits
from trunkline_worker.scheduler.running_set import Evictions, RunningSet
from trunkline_worker.scheduler.shares import (
    BLOCKS,
    ROUNDING,
    Demand,
    LaneShares,
    holds_most,
    least_to_redo,
    may_take,
    within_share,
)
from trunkline_worker.scheduler.step_budget import StepBudget
from trunkline_worker.scheduler.step_cost import StepCost
from trunkline_worker.scheduler.waiting import Waiting

# Tenants of a lane that are looked at in one step, the least served first, and as many again of those that want little.
# Bounds the cost of a step.
MAX_LOOKED_AT = 8
MAX_VICTIMS = 16  # the most sequences that give way for one newcomer in a step
# For this long after several tenants had sequences in a lane, a tenant that is alone there does not stretch steps: the
# others may return at any moment.
SHARED_S = 10.0
# While sequences wait that did not fit, shares are computed again after this time: they change as sequences grow.
LOOK_AGAIN_S = 1.0


class LaneSharing:
    """The sharing rules of all lanes. Shares are computed at most once in a step."""

    def __init__(
        self,
        *,
        limits: SchedulerLimits,
        running: RunningSet,
        waiting: Waiting,
        blocks: KVBlocks,
        cost: StepCost,
        admission: Admission,
        overdue: Overdue,
        evictions: Evictions,
    ) -> None:
        self._limits = limits
        self._running = running
        self._waiting = waiting
        self._blocks = blocks
        self._cost = cost
        self._admission = admission
        self._overdue = overdue
        self._evictions = evictions
        self._now_s = float("-inf")
        self._shares: dict[Lane, LaneShares] = {}  # of the lanes that this step has asked for
        self._shared_until_s = [float("-inf") for _ in LANES]
        # The highest lane in which room is being made for a waiting sequence: no other sequence may have it.
        self.makes_room_in: Lane | None = None
        # Waiting sequences for which others were preempted, by lane: they get the room, not the preempted ones.
        self._expected: list[Sequence | None] = [None for _ in LANES]
        self._num_modest = 0  # tenants that want little, looked at so far: they take turns at being the first

    def begin_step(self, now_s: float) -> None:
        """Called before each step."""
        self._now_s = now_s
        self._shares.clear()
        self.makes_room_in = None
        for lane in self.contended():
            self._shared_until_s[lane] = now_s + SHARED_S

    def contended(self) -> list[Lane]:
        """Lanes in which more than one tenant has sequences, the highest first."""
        return [accounts.lane for accounts in self._waiting.lanes if accounts.num_active > 1]

    def changes_s(self, after_s: float) -> float | None:
        """The first time after `after_s` at which time alone changes a decision made here; None: it does not."""
        changes_s = float("inf")
        for time_s in self._shared_until_s:
            if after_s < time_s < changes_s:
                changes_s = time_s
        if self.contended():
            changes_s = min(changes_s, after_s + LOOK_AGAIN_S)
        return changes_s if changes_s < float("inf") else None

    def joined(self, lane: Lane) -> None:
        """Called when a sequence of a lane was admitted other than by share_out()."""
        self._shares.pop(lane, None)

    def left(self, sequence: Sequence) -> None:
        """Called when a sequence was preempted."""
        shares = self._shares.get(sequence.lane)
        if shares is not None and sequence in shares.members.get(sequence.account, ()):
            shares.remove(sequence)

    def order(self, running: list[Sequence]) -> list[Sequence]:
        """Running sequences in the order in which they may grow where blocks are short: within a lane, those of the
        tenant with the lowest level first. So the sequences that must give way have not been planned yet."""
        levels = {}
        for lane in self.contended():
            shares = self._of(lane)
            levels.update({account: shares.level(account) for account in shares.members})
        return sorted(running, key=lambda s: (s.account.lane, levels.get(s.account, 0.0), s.arrival))

    def may_stretch(self, sequence: Sequence) -> bool:
        """Whether steps may be stretched for a waiting sequence: its tenant is alone, or would still not hold more than
        every other tenant."""
        if self._now_s >= self._shared_until_s[sequence.lane]:
            return True
        shares, account = self._of(sequence.lane), sequence.account
        return shares.level_with(account, shares.demand(sequence)) <= shares.highest_level(account)

    def end_stretching(self, lane: Lane) -> None:
        """Brings steps back under their target time where a tenant stretched them while it was alone."""
        if not self._limits.itl_target_s or not self._admission.is_stretched(lane, self._running.members):
            return
        shares = self._of(lane)
        while self._evictions.left and shares.step_time > 1.0:
            first, *others = sorted(shares.members, key=lambda account: -shares.held(account).time / account.weight)
            victim = least_to_redo(self._candidates(shares, first))
            if victim is None:
                return
            second = max((shares.held(other).time / other.weight for other in others), default=0.0)
            after = shares.held(first).time - shares.members[first][victim].time
            if len(shares.members[first]) == 1 or after / first.weight < second:
                return
            victim.has_yielded = True
            self._preempt(victim)

    def share_out(self, lane: Lane, now_s: float) -> None:
        """Admits waiting sequences that do not fit only because other tenants hold more than theirs."""
        running, admission = self._running, self._admission
        budget = self._budget()
        lane_is_overdue = self._overdue.is_overdue(lane, now_s)
        growth = self._growth_blocks(lane)
        is_behind = False  # a sequence earlier in the order waits for more than it may take
        for sequence, is_modest in self._in_order(lane):
            is_behind |= is_modest
            if not self._evictions.left or not budget.can_begin(sequence):
                break
            is_overdue = lane_is_overdue and self.may_stretch(sequence)
            fits = admission.would_fit_without(
                [], sequence, running.members, is_overdue=is_overdue, growth_blocks=growth
            )
            is_expected = sequence is self._expected[lane]
            if fits and not is_behind and not is_expected:
                continue  # it is admitted together with all others
            shares = self._of(lane)
            demand = shares.demand(sequence)
            has_right = is_expected or within_share(shares, sequence.account, demand)
            if (
                has_right
                if fits
                else self._take(sequence, shares, demand, is_overdue=is_overdue, has_right=has_right, growth=growth)
            ):
                running.join(sequence, now_s)
                shares.add(sequence, demand)
                budget.take_chunk(sequence, self._limits.max_step_tokens)
            elif self.makes_room_in is not None:
                self._expected[lane] = sequence
                break
            else:
                is_behind = True
        self._waiting.restore()

    def _in_order(self, lane: Lane) -> Iterator[tuple[Sequence, bool]]:
        """Waiting sequences that may be admitted, with their cached prefixes looked up, and whether they are modest.

        First the one for which room has been made, then the next one of each tenant, and again the next one of a tenant
        of which one was admitted. The modest ones come last: sequences of other tenants that want little.
        """
        waiting, computes_next_of = self._waiting, self._running.computes_next_of
        expected, self._expected[lane] = self._expected[lane], None
        if expected is not None and expected in waiting and not computes_next_of(expected):
            self._expected[lane] = expected
            yield expected, False
            self._expected[lane] = None
        looked_at: set[Account] = set()
        for _ in range(MAX_LOOKED_AT):
            sequence = waiting.next(lane)
            if sequence is None:
                return
            looked_at.add(sequence.account)
            if not computes_next_of(sequence):
                yield sequence, False
            if sequence in waiting:
                waiting.pass_over(lane)
        # Tenants that wait for much stand first in every step; they must not hide those that are within their share.
        modest = [one for one in waiting.of_other_tenants(lane, looked_at) if self._is_modest(one)]
        first = self._num_modest % len(modest) if len(modest) > MAX_LOOKED_AT else 0
        for sequence in (modest[first:] + modest[:first])[:MAX_LOOKED_AT]:
            self._num_modest += 1
            if not computes_next_of(sequence):
                yield sequence, True

    def _is_modest(self, sequence: Sequence) -> bool:
        """Whether a tenant stays within its fair share of places and KV with all that it has waiting, each as long as
        this sequence. A quick estimate."""
        account = sequence.account
        places = (account.running + account.num_queued) / self._admission.places(account.lane)
        blocks = account.num_queued * self._blocks.blocks_for(len(sequence.token_ids))
        level = max(places, blocks / self._admission.pool_blocks(account.lane)) / account.weight
        return level <= self._waiting.lanes[account.lane].fair_share

    def _growth_blocks(self, lane: Lane) -> int:
        """Blocks that running sequences of a lane and those above it need to decode in this step. A sequence that is
        admitted leaves them free, or it would be preempted for them at once."""
        size = self._blocks.block_size
        return sum(
            [s.num_scheduled >= len(s.block_table) * size for s in self._running.members if s.account.lane <= lane]
        )

    def _take(
        self, sequence: Sequence, shares: LaneShares, demand: Demand, *, is_overdue: bool, has_right: bool, growth: int
    ) -> bool:
        """Preempts others for a waiting sequence, if that is enough. Returns whether it fits now.

        demand: of the sequence; growth: blocks that the running sequences need in this step
        """
        running, evictions = self._running, self._evictions
        lower = evictions.of_lower_lanes(sequence)

        def fits_without(gone: list[Sequence], *, with_retiring: bool = True) -> bool:
            """with_retiring: retiring blocks count as free"""
            return self._admission.would_fit_without(
                gone, sequence, running.members, is_overdue=is_overdue, growth_blocks=growth,
                retiring_blocks=running.num_retiring_blocks if with_retiring else 0,
            )  # fmt: skip

        others = [s for account in shares.members if account is not sequence.account
                  for s in self._candidates(shares, account)]  # fmt: skip
        if not fits_without([*lower, *others]):
            return False
        taken = self._victims(
            sequence, shares, demand, lower, fits_without=fits_without, is_overdue=is_overdue, has_right=has_right
        )
        if taken is None:
            return False
        self.makes_room_in = sequence.lane
        lower.sort(key=lambda s: (-s.lane, s.num_scheduled - s.num_reused))
        # Lower lanes come last: where they alone are not enough, they may not be needed at all.
        for victim in [*taken, *lower]:
            if not evictions.left or fits_without([]):
                break
            victim.has_yielded = victim.lane is sequence.lane
            self._preempt(victim)
        if not fits_without([], with_retiring=False):
            return False
        self.makes_room_in = None
        return True

    def _victims(
        self,
        sequence: Sequence,
        shares: LaneShares,
        demand: Demand,
        lower: list[Sequence],
        *,
        fits_without: Callable[[list[Sequence]], bool],
        is_overdue: bool,
        has_right: bool,
    ) -> list[Sequence] | None:
        """Sequences of other tenants of the lane that give way for a waiting one, as many as may be needed; None: those
        that may be taken are not enough.

        lower: sequences of lower lanes, which give way as well
        """
        running, admission = self._running.members, self._admission
        with_newcomer = shares.level_with(sequence.account, demand)
        chosen: list[tuple[Sequence, Demand]] = []
        taken: list[Sequence] = []
        # A check costs as much as a small step: the number of victims is doubled from one check to the next.
        checked = 0
        is_enough = fits_without(lower)
        # A sequence that gave way does not take back: each newcomer takes once.
        may_take_any = has_right or not sequence.generation
        while not is_enough and may_take_any and len(taken) < MAX_VICTIMS:
            resource = admission.scarce_resource(sequence, running, [*lower, *taken], is_overdue=is_overdue)
            victim = self._victim(shares, sequence.account, resource, with_newcomer, has_right=has_right)
            if victim is None:
                break
            chosen.append((victim, shares.remove(victim)))
            taken.append(victim)
            if len(taken) > 2 * checked:
                is_enough, checked = fits_without([*lower, *taken]), len(taken)
        if not is_enough and len(taken) > checked:
            is_enough = fits_without([*lower, *taken])
        for victim, held in chosen:
            shares.add(victim, held)
        return taken if is_enough else None

    def _victim(
        self, shares: LaneShares, taker: Account, resource: int, with_newcomer: float, *, has_right: bool
    ) -> Sequence | None:
        """The sequence that is cheapest to preempt, of the tenant that holds most of a resource among those from which
        may_take() allows to take."""
        for account in holds_most(shares, resource, taker):
            victim = least_to_redo(self._candidates(shares, account))
            if victim is not None and may_take(
                with_newcomer,
                shares.level(account),
                shares.level_without(victim),
                shares.fair_share,
                has_right=has_right,
            ):
                return victim
        return None

    def victim_of_growth(self, sequence: Sequence) -> Sequence | None:
        """The sequence of the same lane that gives way for a running sequence that needs one more block.

        It is one of a tenant that holds more, by the same rule as for a newcomer; otherwise a younger one of the same
        tenant. For the oldest of a tenant, it is one of the tenant that holds most of all, so that at least one
        sequence always advances.
        """
        shares, own = self._of(sequence.lane), sequence.account
        level = shares.level(own)
        victim = self._victim(shares, own, BLOCKS, level, has_right=level <= shares.fair_share + ROUNDING)
        if victim is not None:
            return victim
        younger = [s for s in self._candidates(shares, own) if s.rank > sequence.rank]
        if younger:
            return least_to_redo(iter(younger))
        if any(other.rank < sequence.rank for other in shares.members.get(own, ())):
            return None
        fullest = max(shares.members, key=lambda account: (shares.level(account), _oldest(shares, account)))
        if fullest is own:
            return None
        return least_to_redo(self._candidates(shares, fullest))

    def _of(self, lane: Lane) -> LaneShares:
        shares = self._shares.get(lane)
        if shares is None:
            accounts = self._waiting.lanes[lane]
            shares = self._shares[lane] = LaneShares(lane, self._running.members, accounts, self._admission)
        return shares

    def _preempt(self, sequence: Sequence) -> None:
        self._evictions.evict(sequence)
        self.left(sequence)

    def _candidates(self, shares: LaneShares, account: Account) -> Iterator[Sequence]:
        """Running sequences of a tenant that may be preempted for another one of their lane. One that was preempted
        before first gets a token: otherwise two sequences could preempt each other for ever."""
        members = shares.members.get(account, ())
        return (s for s in members if not s.owes_progress and self._evictions.may_evict(s))

    def _budget(self) -> StepBudget:
        """What the step has for prompts if all running sequences decode."""
        budget = StepBudget(self._limits, self._cost)
        budget.num_decode, budget.decode_kv_tokens = len(self._running.members), self._running.kv_tokens
        budget.tokens_left -= budget.num_decode
        budget.decodes_are_in()
        return budget


def _oldest(shares: LaneShares, account: Account) -> int:
    return min(sequence.arrival for sequence in shares.members[account])
