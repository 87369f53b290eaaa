"""What each tenant of a lane holds: its dominant share (Ghodsi et al., NSDI 2011), over its weight.

A sequence takes three resources: a place in the running set, KV blocks, and time of every step. A tenant's level is the
largest part that it holds of any of them, divided by its weight. Where admission forecasts KV, the forecast counts, so
a level changes little while a sequence grows. docs/fairness.md has the rules and the proof.
"""

from collections.abc import Iterator
from typing import NamedTuple

from trunkline_worker.cache.sequence import Sequence
from trunkline_worker.scheduler.admission import Admission, Resource
from trunkline_worker.step.fair_share import Account, Accounts
from trunkline_worker.step.lanes import Lane


class Demand(NamedTuple):
    """What sequences take of each Resource, as fractions of all that their lane can have."""

    places: float
    blocks: float
    time: float


NOTHING = Demand(0.0, 0.0, 0.0)


class LaneShares:
    """The shares of the tenants of one lane that have running sequences; add() and remove() keep them up to date."""

    def __init__(self, lane: Lane, running: list[Sequence], accounts: Accounts, admission: Admission) -> None:
        self._lane = lane
        self._admission = admission
        self.fair_share = accounts.fair_share
        self.members: dict[Account, dict[Sequence, Demand]] = {}
        self._held: dict[Account, Demand] = {}
        sequences = [sequence for sequence in running if sequence.account.lane is lane]
        for sequence, demand in zip(sequences, self._demands(sequences, waits=False), strict=True):
            self.add(sequence, demand)

    def demand(self, sequence: Sequence) -> Demand:
        """What a waiting sequence would take. KVBlocks.match() must just have been called."""
        return next(self._demands([sequence], waits=True))

    def add(self, sequence: Sequence, demand: Demand) -> None:
        """Counts a sequence that has joined the running set."""
        account = sequence.account
        self.members.setdefault(account, {})[sequence] = demand
        places, blocks, time = self._held.get(account, NOTHING)
        self._held[account] = Demand(places + demand.places, blocks + demand.blocks, time + demand.time)

    def remove(self, sequence: Sequence) -> Demand:
        """Stops counting a sequence that has left the running set, and returns what it took."""
        account = sequence.account
        demand = self.members[account].pop(sequence)
        self._held[account] = self._without(account, demand)
        if not self.members[account]:
            del self.members[account], self._held[account]
        return demand

    def held(self, account: Account) -> Demand:
        """What a tenant's running sequences take."""
        return self._held.get(account, NOTHING)

    def level(self, account: Account) -> float:
        """The tenant's largest fraction of any resource, over its weight."""
        return max(self.held(account)) / account.weight

    def level_with(self, account: Account, demand: Demand) -> float:
        """A tenant's level if it had this much more."""
        held = self.held(account)
        return max(held.places + demand.places, held.blocks + demand.blocks, held.time + demand.time) / account.weight

    def level_without(self, sequence: Sequence) -> float:
        """A tenant's level if one of its sequences did not run."""
        account = sequence.account
        return max(self._without(account, self.members[account][sequence])) / account.weight

    def highest_level(self, apart_from: Account) -> float:
        """The highest level of the other tenants that have running sequences."""
        return max([self.level(account) for account in self._held if account is not apart_from], default=0.0)

    @property
    def step_time(self) -> float:
        """Fraction of the lane's step time that its decodes take; more than 1 if steps are stretched."""
        return sum(held.time for held in self._held.values())

    def _without(self, account: Account, demand: Demand) -> Demand:
        held = self._held[account]
        if len(self.members[account]) == 1 and demand in self.members[account].values():
            return NOTHING  # so rounding errors do not add up
        return Demand(held.places - demand.places, held.blocks - demand.blocks, held.time - demand.time)

    def _demands(self, sequences: list[Sequence], *, waits: bool) -> Iterator[Demand]:
        admission = self._admission
        place, block = 1.0 / admission.places(self._lane), 1.0 / admission.pool_blocks(self._lane)
        fixed_time, token_time = admission.decode_time(self._lane)
        foreseen = admission.foreseen_blocks(sequences, self._lane, waits=waits)
        for sequence, blocks in zip(sequences, foreseen, strict=True):
            time = fixed_time + token_time * len(sequence.token_ids) if sequence.will_decode else 0.0
            yield Demand(place, blocks * block, time)


def may_take(with_newcomer: float, victim: float, without_victim: float, fair_share: float, *, has_right: bool) -> bool:
    """Whether one tenant's sequence may be preempted for another tenant's.

    with_newcomer: level of the tenant that takes, including what it takes; victim, without_victim: level of the tenant
    that gives, before and after; has_right: whether the tenant that takes stays within its fair share (within_share())
    """
    if with_newcomer >= victim or victim <= fair_share + ROUNDING:
        return False
    return has_right or FAR_LESS * with_newcomer <= without_victim


def within_share(shares: LaneShares, account: Account, demand: Demand) -> bool:
    """Whether a tenant stays within its fair share with all its waiting sequences, each as large as the next one.

    demand: of the next sequence
    """
    count = account.num_queued
    everything = Demand(count * demand.places, count * demand.blocks, count * demand.time)
    return shares.level_with(account, everything) <= shares.fair_share + ROUNDING


# A tenant that wants more than its fair share takes only from one that has this many times as much: where several have
# a backlog, the order of admission keeps them level, and no sequence has to be computed again.
FAR_LESS = 2.0
ROUNDING = 1e-9  # of sums of parts


def least_to_redo(sequences: Iterator[Sequence]) -> Sequence | None:
    """The sequence with the fewest tokens to compute again if it is preempted; None if there is none."""
    return min(sequences, key=lambda sequence: sequence.num_scheduled - sequence.num_reused, default=None)


def holds_most(shares: LaneShares, resource: Resource, apart_from: Account) -> list[Account]:
    """The other tenants with running sequences, those that hold most of a resource first."""
    others = [account for account in shares.members if account is not apart_from]
    return sorted(others, key=lambda account: -shares.held(account)[resource] / account.weight)
