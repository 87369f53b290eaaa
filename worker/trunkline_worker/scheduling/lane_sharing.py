"""How the tenants of a lane share places, KV blocks and the time of a step; docs/fairness.md has the bounds.

Where everything fits, nothing here matters: a tenant alone uses all there is. Where a tenant's next sequence does not
fit, running sequences of a tenant that holds more give way, by shares.may_take(). Each time they do, the highest of the
levels concerned sinks, so with the same tenants it comes to an end, and nothing goes back and forth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from trunkline_worker.cache.sequence import Sequence
from trunkline_worker.lanes.fair_share import Account
from trunkline_worker.lanes.lanes import LANES, Lane
from trunkline_worker.pace.step_budget import StepBudget
from trunkline_worker.scheduling.running_set import RunningSet
from trunkline_worker.scheduling.shares import (
    BLOCKS,
    ROUNDING,
    Demand,
    LaneShares,
    holds_most,
    least_to_redo,
    may_take,
    within_share,
)

if TYPE_CHECKING:
    from trunkline_worker.scheduling.preemption import Preemption

# Tenants of a lane that are looked at in one step, the least served first, and so many more of those that want little:
# bounds the cost of a step.
MAX_LOOKED_AT = 8
MAX_VICTIMS = 16  # of one newcomer, found in one step; more are not looked for
# For so long after several tenants had something in a lane, one of them alone does not stretch steps there: the others
# may be back at any moment.
SHARED_S = 10.0
# Where sequences wait that did not fit, shares are looked at again after this time: they change as sequences grow.
LOOK_AGAIN_S = 1.0


class LaneSharing:
    """Of all lanes; what it finds out is of one step."""

    def __init__(self, running_set: RunningSet, preemption: Preemption) -> None:
        self._set = running_set
        self._preemption = preemption
        self._now_s = float("-inf")
        self._shares: dict[Lane, LaneShares] = {}  # as far as they were asked for in this step
        self._shared_until_s = [float("-inf") for _ in LANES]
        # The highest lane in which room is being made for one that waits: nobody else may have it.
        self.makes_room_in: Lane | None = None
        # Those for whom others were preempted, by lane: they get the room, not those who made it.
        self._expected: list[Sequence | None] = [None for _ in LANES]
        self._num_modest = 0  # tenants that want little, looked at so far: they take turns at being the first

    def begin_step(self, now_s: float) -> None:
        self._now_s = now_s
        self._shares.clear()
        self.makes_room_in = None
        for lane in self.contended():
            self._shared_until_s[lane] = now_s + SHARED_S

    def contended(self) -> list[Lane]:
        """Lanes in which more than one tenant has something, the highest first."""
        return [accounts.lane for accounts in self._set.waiting.lanes if accounts.num_active > 1]

    def changes_s(self, after_s: float) -> float | None:
        """When time alone changes what is decided here, later than this; None: it does not."""
        changes_s = float("inf")
        for time_s in self._shared_until_s:
            if after_s < time_s < changes_s:
                changes_s = time_s
        if self.contended():
            changes_s = min(changes_s, after_s + LOOK_AGAIN_S)
        return changes_s if changes_s < float("inf") else None

    def left(self, sequence: Sequence) -> None:
        """A sequence was preempted."""
        shares = self._shares.get(sequence.lane)
        if shares is not None and sequence in shares.members.get(sequence.account, ()):
            shares.remove(sequence)

    def order(self, running: list[Sequence]) -> list[Sequence]:
        """Running sequences in the order in which they may grow where blocks are short: within a lane, those of the
        tenant with the lowest level first. Who is to give way has then not been planned yet."""
        levels = {}
        for lane in self.contended():
            shares = self._of(lane)
            levels.update({account: shares.level(account) for account in shares.members})
        return sorted(running, key=lambda s: (s.account.lane, levels.get(s.account, 0.0), s.arrival))

    def may_stretch(self, sequence: Sequence) -> bool:
        """Whether a sequence that waits may have steps stretched: its tenant is alone, or does not come to hold more
        than all others."""
        if self._now_s >= self._shared_until_s[sequence.lane]:
            return True
        shares, account = self._of(sequence.lane), sequence.account
        return shares.level_with(account, shares.demand(sequence)) <= shares.highest_level(account)

    def end_stretching(self, lane: Lane) -> None:
        """Has steps take no longer than they should where a tenant had them stretched while it was alone."""
        running_set = self._set
        if not running_set.limits.itl_target_s or not running_set.admission.is_stretched(lane, running_set.running):
            return
        shares = self._of(lane)
        while self._preemption.left and shares.step_time > 1.0:
            first, *others = sorted(shares.members, key=lambda account: -shares.held(account).time / account.weight)
            victim = least_to_redo(self._candidates(shares, first))
            if victim is None:
                return
            second = max((shares.held(other).time / other.weight for other in others), default=0.0)
            after = shares.held(first).time - shares.members[first][victim].time
            if len(shares.members[first]) == 1 or after / first.weight < second:
                return
            victim.has_yielded = True
            self._preemption.preempt(victim)

    def share_out(self, lane: Lane, now_s: float) -> None:
        """Lets in those who wait, and do not fit only because others hold more than they."""
        running_set, waiting, admission = self._set, self._set.waiting, self._set.admission
        budget = self._budget()
        hurries = running_set.hurries(lane, now_s)
        growth = self._growth_blocks(lane)
        is_behind = False  # one that comes before it in the order waits for more than it may take
        for sequence, is_modest in self._in_order(lane):
            is_behind |= is_modest
            if not self._preemption.left or not budget.can_begin(sequence):
                break
            may_hurry = hurries and self.may_stretch(sequence)
            fits = admission.would_fit_without(
                [], sequence, running_set.running, hurries=may_hurry, growth_blocks=growth
            )
            is_expected = sequence is self._expected[lane]
            if fits and not is_behind and not is_expected:
                continue  # it is let in with all others
            shares = self._of(lane)
            demand = shares.demand(sequence)
            has_right = is_expected or within_share(shares, sequence.account, demand)
            if (
                has_right
                if fits
                else self._take(sequence, shares, demand, hurries=may_hurry, has_right=has_right, growth=growth)
            ):
                running_set.join(sequence, now_s)
                shares.add(sequence, demand)
                budget.take_chunk(sequence, running_set.limits.max_step_tokens)
            elif self.makes_room_in is not None:
                self._expected[lane] = sequence
                break
            else:
                is_behind = True
        waiting.restore()

    def _in_order(self, lane: Lane) -> Iterator[tuple[Sequence, bool]]:
        """Those that wait and may be let in: one for whom room has been made, then the next one of each tenant, and
        again the next one of a tenant of which one was let in; at last those of other tenants that want little, and
        True. What of them is cached has been looked for."""
        running_set, waiting = self._set, self._set.waiting
        expected, self._expected[lane] = self._expected[lane], None
        if expected is not None and expected in waiting and not running_set.waits_for_prefix(expected):
            self._expected[lane] = expected
            yield expected, False
            self._expected[lane] = None
        looked_at: set[Account] = set()
        for _ in range(MAX_LOOKED_AT):
            sequence = waiting.next(lane)
            if sequence is None:
                return
            looked_at.add(sequence.account)
            if not running_set.waits_for_prefix(sequence):
                yield sequence, False
            if sequence in waiting:
                waiting.pass_over(lane)
        # Tenants that wait for much stand first in every step; they must not hide those that are within their share.
        modest = [one for one in waiting.of_other_tenants(lane, looked_at) if self._is_modest(one)]
        first = self._num_modest % len(modest) if len(modest) > MAX_LOOKED_AT else 0
        for sequence in (modest[first:] + modest[:first])[:MAX_LOOKED_AT]:
            self._num_modest += 1
            if not running_set.waits_for_prefix(sequence):
                yield sequence, True

    def _is_modest(self, sequence: Sequence) -> bool:
        """Whether a tenant stays within its fair share of places and KV with all that it has waiting, each as long as
        this one, as far as that is seen at once."""
        running_set, account = self._set, sequence.account
        places = (account.running + account.num_queued) / running_set.admission.places(account.lane)
        blocks = account.num_queued * running_set.blocks.blocks_for(len(sequence.token_ids))
        level = max(places, blocks / running_set.admission.pool_blocks(account.lane)) / account.weight
        return level <= running_set.waiting.lanes[account.lane].fair_share

    def _growth_blocks(self, lane: Lane) -> int:
        """Blocks that sequences of a lane and those above it need in this step to go on. One that is let in leaves
        them: it would be preempted for them at once."""
        size = self._set.blocks.block_size
        return sum([s.num_scheduled >= len(s.block_table) * size for s in self._set.running if s.account.lane <= lane])

    def _take(
        self,
        sequence: Sequence,
        shares: LaneShares,
        demand: Demand,
        *,
        hurries: bool,
        has_right: bool,
        growth: int,
    ) -> bool:
        """Preempts others for a sequence, if that is enough. Whether it fits now.

        demand: its; growth: blocks that those who run need in this step
        """
        running_set, preemption = self._set, self._preemption
        lower = preemption.of_lower_lanes(sequence)

        def fits_without(gone: list[Sequence], *, waits: bool = True) -> bool:
            """waits: blocks that are on their way count"""
            return running_set.admission.would_fit_without(
                gone, sequence, running_set.running, hurries=hurries, growth_blocks=growth,
                retiring_blocks=running_set.num_retiring_blocks if waits else 0,
            )  # fmt: skip

        others = [s for account in shares.members if account is not sequence.account
                  for s in self._candidates(shares, account)]  # fmt: skip
        if not fits_without([*lower, *others]):
            return False
        taken = self._victims(sequence, shares, demand, lower, fits_without, hurries=hurries, has_right=has_right)
        if taken is None:
            return False
        self.makes_room_in = sequence.lane
        lower.sort(key=lambda s: (-s.lane, s.num_scheduled - s.num_reused))
        # Where lower lanes alone are not enough, they may not be needed at all.
        for victim in [*taken, *lower]:
            if not preemption.left or fits_without([]):
                break
            victim.has_yielded = victim.lane is sequence.lane
            preemption.preempt(victim)
        if not fits_without([], waits=False):
            return False
        self.makes_room_in = None
        return True

    def _victims(
        self,
        sequence: Sequence,
        shares: LaneShares,
        demand: Demand,
        lower: list[Sequence],
        fits_without: Callable[[list[Sequence]], bool],
        *,
        hurries: bool,
        has_right: bool,
    ) -> list[Sequence] | None:
        """Sequences of other tenants of its lane, some of which give way for one that waits; None: those that may be
        taken are not enough.

        lower: those of lower lanes, which give way as well
        """
        running, admission = self._set.running, self._set.admission
        with_newcomer = shares.level_with(sequence.account, demand)
        chosen: list[tuple[Sequence, Demand]] = []
        taken: list[Sequence] = []
        # A check costs as much as a small step: the number of victims is doubled from one to the next.
        checked = 0
        is_enough = fits_without(lower)
        # One that gave way does not take back: each newcomer takes once.
        may_take_any = has_right or not sequence.generation
        while not is_enough and may_take_any and len(taken) < MAX_VICTIMS:
            resource = admission.scarce_resource(sequence, running, [*lower, *taken], hurries=hurries)
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
        """Of another tenant, one that holds most of what is wanted, the sequence that is cheapest to preempt."""
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
        """Who gives way in its lane for a running sequence that wants one more block: one of a tenant that holds more,
        by the same rule as for a newcomer; else a younger one of its own tenant. For the oldest of a tenant, one of
        the tenant that holds most of all, so that somebody always gets on."""
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
            running_set = self._set
            accounts = running_set.waiting.lanes[lane]
            shares = self._shares[lane] = LaneShares(lane, running_set.running, accounts, running_set.admission)
        return shares

    def joined(self, lane: Lane) -> None:
        """A sequence of a lane was let in by others than share_out()."""
        self._shares.pop(lane, None)

    def _candidates(self, shares: LaneShares, account: Account) -> Iterator[Sequence]:
        """Who of a tenant may be preempted."""
        is_settled = self._preemption.is_settled
        return (s for s in shares.members.get(account, ()) if not s.is_guest and not is_settled(s))

    def _budget(self) -> StepBudget:
        """What the step has for prompts, as if all who run decoded."""
        running_set = self._set
        budget = StepBudget(running_set.limits, running_set.cost)
        budget.num_decode, budget.decode_kv_tokens = len(running_set.running), running_set.running_kv_tokens
        budget.tokens_left -= budget.num_decode
        budget.decodes_are_in()
        return budget


def _oldest(shares: LaneShares, account: Account) -> int:
    return min(sequence.arrival for sequence in shares.members[account])
