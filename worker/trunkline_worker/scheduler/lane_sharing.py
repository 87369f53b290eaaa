"""How the tenants of a lane share places, KV blocks and the time of a step; docs/fairness.md has the bounds.

Where everything fits, these rules have no effect: a tenant alone uses all there is. Where a tenant's next sequence does
not fit, running sequences of a tenant that holds more give way, by shares.may_take(). Each preemption lowers the
highest of the levels concerned. A sequence that gave way gets a token before it gives way again, so preemptions come to
an end even where levels change while sequences grow.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from trunkline_worker.cache.blocks import KVBlocks
from trunkline_worker.cache.sequence import Sequence
from trunkline_worker.scheduler.admission import Admission, Resource
from trunkline_worker.scheduler.aging import Overdue
from trunkline_worker.scheduler.limits import SchedulerLimits
from trunkline_worker.scheduler.running_set import Evictions, RunningSet
from trunkline_worker.scheduler.shares import (
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
from trunkline_worker.step.fair_share import Account
from trunkline_worker.step.lanes import LANES, Lane

# Waiting sequences that are looked at in one step, and as many again of tenants that want little. Bounds its cost.
MAX_LOOKED_AT = 8
MAX_VICTIMS = 16  # the most sequences that give way for one newcomer in a step
# For this long after several tenants had sequences in a lane, a tenant that is alone there does not stretch steps: the
# others may return at any moment.
SHARED_S = 10.0
# While sequences wait that did not fit, shares are computed again after this time: they change as sequences grow.
LOOK_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A waiting sequence for which others may have to give way."""

    sequence: Sequence
    demand: Demand
    has_right: bool  # whether its tenant stays within its fair share, or room was made for it before
    is_overdue: bool
    growth_blocks: int  # that running sequences need in this step


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
        # A waiting sequence of a modest tenant that fitted before the running ones grew in this step. It may fit again
        # in the next one.
        self.fitted: Sequence | None = None
        # Waiting sequences for which others were preempted, by lane: they get the room, not the preempted ones.
        self._expected: list[Sequence | None] = [None for _ in LANES]
        self._num_modest = 0  # sequences of modest tenants that were looked at in their turn

    def begin_step(self, now_s: float) -> None:
        """Called before each step."""
        self._now_s = now_s
        self._shares.clear()
        self.makes_room_in = None
        self.fitted = None
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
        expected, self._expected[lane] = self._expected[lane], None
        is_behind = False  # a sequence earlier in the order waits for more than it may take
        for sequence in self._in_order(lane, expected):
            if not self._evictions.left or not budget.can_begin(sequence):
                break
            is_overdue = lane_is_overdue and self.may_stretch(sequence)
            missing = admission.missing_without(
                [], sequence, running.members, is_overdue=is_overdue, growth_blocks=growth
            )
            if missing is None and not is_behind and sequence is not expected:
                if self._is_modest(sequence):
                    self.fitted = sequence
                continue  # it is admitted together with all others
            shares = self._of(lane)
            demand = shares.demand(sequence)
            has_right = sequence is expected or within_share(shares, sequence.account, demand)
            newcomer = Newcomer(sequence, demand, has_right=has_right, is_overdue=is_overdue, growth_blocks=growth)
            if has_right if missing is None else self._take(newcomer, shares):
                running.join(sequence, now_s)
                shares.add(sequence, demand)
                budget.take_chunk(sequence, self._limits.max_step_tokens)
            elif self.makes_room_in is not None:
                self._expected[lane] = sequence
                break
            else:
                is_behind = True
        self._waiting.restore()

    def _in_order(self, lane: Lane, expected: Sequence | None) -> Iterator[Sequence]:
        """Waiting sequences that may be admitted, with their cached prefixes looked up: the one for which room was
        made, then the next one of each tenant, the least served tenant first, and again the next one of a tenant of
        which one was admitted.

        Tenants that wait for more than their share must not hide those that do not. So a step looks at some of the
        first tenants, and then at some modest ones, which take turns from step to step.
        """
        waiting, computes_next_of = self._waiting, self._running.computes_next_of
        if expected is not None and expected.is_ready and not computes_next_of(expected):
            yield expected
        modest, num_looked_at = list[Sequence](), 0
        while (sequence := waiting.next(lane)) is not None:
            if num_looked_at < MAX_LOOKED_AT:
                num_looked_at += 1
                if not computes_next_of(sequence):
                    yield sequence
            elif self._is_modest(sequence):
                modest.append(sequence)
            if sequence in waiting:
                waiting.pass_over(lane)
        first = self._num_modest % len(modest) if len(modest) > MAX_LOOKED_AT else 0
        for sequence in (modest[first:] + modest[:first])[:MAX_LOOKED_AT]:
            self._num_modest += 1
            if not computes_next_of(sequence):
                yield sequence

    def _is_modest(self, sequence: Sequence) -> bool:
        """Whether a tenant stays within its fair share with all that it has waiting, each as long as this sequence. A
        quick estimate."""
        account, admission = sequence.account, self._admission
        num_tokens = len(sequence.token_ids)
        places = (account.running + account.num_queued) / admission.places(account.lane)
        blocks = account.num_queued * self._blocks.blocks_for(num_tokens) / admission.pool_blocks(account.lane)
        return max(places, blocks) / account.weight <= self._waiting.lanes[account.lane].fair_share

    def _growth_blocks(self, lane: Lane) -> int:
        """Blocks that running sequences of a lane and those above it need to decode in this step. A sequence that is
        admitted leaves them free, or it would be preempted for them at once."""
        size = self._blocks.block_size
        return sum(
            [s.num_scheduled >= len(s.block_table) * size for s in self._running.members if s.account.lane <= lane]
        )

    def _take(self, newcomer: Newcomer, shares: LaneShares) -> bool:
        """Preempts others for a waiting sequence, if that is enough. Returns whether it fits now."""
        evictions, sequence = self._evictions, newcomer.sequence
        lower = evictions.of_lower_lanes(sequence)
        victims = self._victims(newcomer, shares, lower)
        if victims is None:
            return False
        self.makes_room_in = sequence.lane
        lower.sort(key=lambda s: (-s.lane, s.num_scheduled - s.num_reused))
        # Lower lanes come last: where they alone are not enough, they may not be needed at all.
        for victim in [*victims, *lower]:
            if not evictions.left or self._missing(newcomer, []) is None:
                break
            victim.has_yielded = victim.lane is sequence.lane
            self._preempt(victim)
        if self._missing(newcomer, [], with_retiring=False) is not None:
            return False
        self.makes_room_in = None
        return True

    def _victims(self, newcomer: Newcomer, shares: LaneShares, lower: list[Sequence]) -> list[Sequence] | None:
        """Sequences of other tenants of the lane that give way for a newcomer, as many as are needed if all `lower`
        ones give way as well; None: those that may be taken are not enough."""
        others = [
            sequence
            for account in shares.members
            if account is not newcomer.sequence.account
            for sequence in self._candidates(shares, account)
        ]
        if self._missing(newcomer, [*lower, *others]) is not None:
            return None
        level = shares.level_with(newcomer.sequence.account, newcomer.demand)
        # A sequence that gave way does not take back: each newcomer takes once.
        most = MAX_VICTIMS if newcomer.has_right or not newcomer.sequence.generation else 0
        taken: dict[Sequence, Demand] = {}
        missing = self._missing(newcomer, lower)
        while missing is not None:
            victim = None
            if len(taken) < most:
                victim = self._victim(shares, newcomer.sequence.account, missing, level, has_right=newcomer.has_right)
            if victim is None:
                break
            taken[victim] = shares.remove(victim)
            missing = self._missing(newcomer, [*lower, *taken])
        for victim, demand in taken.items():
            shares.add(victim, demand)
        return list(taken) if missing is None else None

    def _missing(self, newcomer: Newcomer, victims: list[Sequence], *, with_retiring: bool = True) -> Resource | None:
        """What a newcomer lacks if the victims are preempted.  with_retiring: retiring blocks count as free"""
        running = self._running
        return self._admission.missing_without(
            victims,
            newcomer.sequence,
            running.members,
            is_overdue=newcomer.is_overdue,
            retiring_blocks=running.num_retiring_blocks if with_retiring else 0,
            growth_blocks=newcomer.growth_blocks,
        )

    def _victim(
        self, shares: LaneShares, taker: Account, resource: Resource, level: float, *, has_right: bool
    ) -> Sequence | None:
        """The sequence that is cheapest to preempt, of the tenant that holds most of a resource among those from which
        may_take() allows to take.  level: of the taker, with what it takes"""
        for account in holds_most(shares, resource, taker):
            victim = least_to_redo(self._candidates(shares, account))
            if victim is not None and may_take(
                level, shares.level(account), shares.level_without(victim), shares.fair_share, has_right=has_right
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
        victim = self._victim(shares, own, Resource.BLOCKS, level, has_right=level <= shares.fair_share + ROUNDING)
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
