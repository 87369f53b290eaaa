"""Whether a waiting sequence may join the running set now: slots, time, KV blocks, and what all will still need.

Part of the slots and of the KV pool is the interactive lane's alone. The lower lanes keep out of it, except that the
only running sequence of theirs may use all there is: nothing that fits the pool is shut out by the reserve.
"""

from collections.abc import Iterable

import numpy as np

from trunkline_worker.cache.blocks import KVBlocks
from trunkline_worker.cache.kv_forecast import peak_blocks
from trunkline_worker.cache.sequence import Sequence
from trunkline_worker.lanes.lanes import LANES, Lane
from trunkline_worker.pace.limits import AdmissionRule, SchedulerLimits
from trunkline_worker.pace.output_lengths import OutputLengths
from trunkline_worker.pace.step_cost import LEAST_ADDED_SHARE, StepCost, StepLoad

LOWER_LANES_DECODE_SHARE = 0.5  # of a step's target time
# Where somebody of a lane has waited for so many target times, those who wait there may stretch a step to so many: a
# first token that is later still is worse than the others' pace.
HELD_TARGETS = 5.0
STRETCHED_TARGETS = 2.0


class Admission:
    """Pure but for what it learns: the lengths of outputs, by lane."""

    def __init__(self, limits: SchedulerLimits, blocks: KVBlocks, cost: StepCost) -> None:
        self._cost = cost
        self._limits = limits
        self._blocks = blocks
        self._reserved_blocks = int(blocks.num_blocks * limits.interactive_reserve)
        self.output_lengths = [OutputLengths() for _ in LANES]
        # Whether a sequence was kept out since this was last cleared, only because larger steps are unknown:
        # the next step may show that there is time.
        self.is_cautious = False

    def fits(self, sequence: Sequence, running: list[Sequence], *, is_overdue: bool) -> bool:
        """Whether it may join now. match() must just have been called.  is_overdue: its lane has waited for long enough"""
        return (
            self.has_slot(sequence, running)
            and self.has_time(sequence, running, is_overdue=is_overdue)
            and self.has_blocks(sequence, running)
        )

    def scarce_resource(
        self, sequence: Sequence, running: list[Sequence], gone: list[Sequence], *, is_overdue: bool
    ) -> int:
        """What a sequence lacks, as an index of shares.Demand, when some of those that run are gone; it must not fit
        then."""
        left = [other for other in running if other not in gone]
        if not self.has_slot(sequence, left):
            return 0
        return 1 if self.has_time(sequence, left, is_overdue=is_overdue) else 2

    def is_stretched(self, lane: Lane, running: list[Sequence]) -> bool:
        """Whether steps take longer than a lane has them take, because of those that decode."""
        decodes = [s for s in running if s.will_decode and (lane or s.lane is not Lane.STANDARD)]
        if not decodes or not self._cost.is_known:
            return False
        alone_s = self._cost.time_s(StepLoad(1, 0, 0.0))
        tokens = sum([len(sequence.token_ids) for sequence in decodes])
        added_s = self._cost.time_s(StepLoad(len(decodes), tokens, 0.0)) - alone_s
        return added_s > self._time_to_add_s(lane, alone_s)

    def has_slot(self, sequence: Sequence, running: list[Sequence]) -> bool:
        """Whether the running set has a place for it. There are no more places than tokens in a step: everyone who
        runs gets on in every step."""
        if len(running) >= self.places(Lane.INTERACTIVE):
            return False
        if sequence.lane is Lane.INTERACTIVE or not self._limits.interactive_reserve:
            return True
        lower = sum(1 for other in running if other.lane is not Lane.INTERACTIVE)
        return lower < self.places(sequence.lane)

    def places(self, lane: Lane) -> int:
        """The most that run at once, of a lane and the lower ones."""
        limits = self._limits
        if lane is Lane.INTERACTIVE:
            return min(limits.max_running_requests, limits.max_step_tokens)
        places = limits.max_running_requests - limits.reserved_running_requests
        return min(places, limits.max_step_tokens - limits.reserved_step_tokens)

    def pool_blocks(self, lane: Lane) -> int:
        """Blocks that a lane can have; at least one."""
        return max(1, self._blocks.num_blocks - (self._reserved_blocks if lane else 0))

    def decode_time(self, lane: Lane) -> tuple[float, float]:
        """The part of a lane's time of a step that a sequence takes that decodes, and that a token of its context takes
        besides; nothing where steps have no target time."""
        target_s, cost = self._limits.itl_target_s, self._cost
        if not target_s or not cost.is_known:
            return 0.0, 0.0
        added_s = self._time_to_add_s(lane, cost.time_s(StepLoad(1, 0, 0.0)))
        return cost.token_s / added_s, cost.kv_token_s / added_s

    def _time_to_add_s(self, lane: Lane, alone_s: float) -> float:
        """What others may add to a step that takes one sequence `alone_s`."""
        share = 1.0 if lane is Lane.INTERACTIVE else LOWER_LANES_DECODE_SHARE
        step_s = self._cost.within_s(self._limits.itl_target_s)
        return max(share * (step_s - alone_s), LEAST_ADDED_SHARE * alone_s)

    def foreseen_blocks(self, sequences: list[Sequence], lane: Lane, *, waits: bool) -> list[float]:
        """For each sequence, blocks of its own that it is foreseen to hold in the end; where admission does not look
        ahead, those that it holds, or takes when it is let in. waits: they do, and match() must just have been called
        """
        if waits:
            own = [self._blocks.num_fresh(sequence) for sequence in sequences]
        else:
            own = [sequence.num_own_blocks for sequence in sequences]
        if self._limits.admission is AdmissionRule.OPTIMISTIC or not sequences:
            return [float(blocks) for blocks in own]
        generated = np.array([sequence.num_output for sequence in sequences])
        most = np.array([sequence.sampling.max_tokens for sequence in sequences]) - generated
        mean, _ = self.output_lengths[lane].remaining(generated)
        foreseen: list[float] = (np.array(own) + np.minimum(mean, most) / self._blocks.block_size).tolist()
        return foreseen

    def has_time(self, sequence: Sequence, running: list[Sequence], *, is_overdue: bool) -> bool:
        """Whether a step stays under its target time with one more sequence that decodes. The lower lanes leave half
        of what others may add for prompts: an interactive one is then computed in few steps, however much bulk work
        runs. A target that not even one alone can meet does not shut the others out.

        A sequence that ends with its first token decodes in no step. One that streams already is not kept from going
        on, unless it was preempted for another tenant. One that is_overdue may stretch the time, unless a higher lane
        runs; bulk work waits for as long as it takes. What the standard lane has stretched is not held against the
        interactive one: nothing is preempted for it, only to come back.
        """
        target_s, lane = self._limits.itl_target_s, sequence.lane
        if not target_s or not running or sequence.promised_len:
            return True
        if not sequence.will_decode:
            return True
        if sequence.num_output and lane is not Lane.BATCH and not sequence.has_yielded:
            return True
        others = running
        if lane is Lane.INTERACTIVE:
            others = [other for other in running if other.lane is not Lane.STANDARD]
        tokens = len(sequence.token_ids)
        alone_s = self._cost.time_s(StepLoad(1, tokens, 0.0))
        kv_tokens = tokens + sum(len(other.token_ids) for other in others)
        fitted_s = self._cost.time_s(StepLoad(len(others) + 1, kv_tokens, 0.0)) - alone_s
        added_s = self._cost.cautious_s(len(others) + 1, kv_tokens) - alone_s
        most_s = self._time_to_add_s(lane, alone_s)
        if added_s <= most_s:
            return True
        self.is_cautious |= fitted_s <= most_s
        if not is_overdue or lane is Lane.BATCH or any(other.lane < lane for other in running):
            return False
        return alone_s + added_s <= STRETCHED_TARGETS * max(target_s, alone_s)

    def reserve_for(self, sequence: Sequence, running: Iterable[Sequence]) -> int:
        """Blocks that must stay available when this sequence takes some: the interactive lane's, as far as that lane
        does not hold them itself, and those promised to a guest."""
        promised = [other for other in running if other.promised_len and other is not sequence]
        reserve = sum([self._blocks.num_missing(other, other.promised_len) for other in promised])
        if sequence.lane is Lane.INTERACTIVE or not self._reserved_blocks:
            return reserve
        if sequence.promised_len or self._is_alone(sequence, running):
            return reserve
        held = sum(other.num_own_blocks for other in running if other.lane is Lane.INTERACTIVE)
        return reserve + max(0, self._reserved_blocks - held)

    def most_reserved(self, running: list[Sequence]) -> int:
        """The most that reserve_for() says of any of them; there must be one."""
        if not self._reserved_blocks and not any([other.promised_len for other in running]):
            return 0
        return max(self.reserve_for(sequence, running) for sequence in running)

    def has_blocks(self, sequence: Sequence, running: list[Sequence]) -> bool:
        """Whether its known tokens fit, and the running set together with it will not outgrow the pool, as far as can
        be foreseen. match() must just have been called."""
        return self.has_room_now(sequence, running) and self._has_room_later(sequence, running)

    def has_room_now(self, sequence: Sequence, running: list[Sequence], given_up: int = 0) -> bool:
        """Whether its known tokens fit, and what it was promised.  given_up: blocks that would be free besides"""
        reserve = self.reserve_for(sequence, running) - given_up
        if sequence.promised_len:
            growth = self._blocks.blocks_for(sequence.promised_len) - self._blocks.blocks_for(len(sequence.token_ids))
            return self._blocks.can_admit(sequence, reserve + growth)
        return self._blocks.can_admit(sequence, reserve)

    def would_fit_without(
        self,
        victims: list[Sequence],
        sequence: Sequence,
        running: list[Sequence],
        *,
        is_overdue: bool,
        retiring_blocks: int = 0,
        growth_blocks: int = 0,
    ) -> bool:
        """Whether it would fit if these were preempted, blocks that are on their way were free, and those that run had
        got what they grow by."""
        gone = set(map(id, victims))
        left = [other for other in running if id(other) not in gone]
        given_up = retiring_blocks + sum(victim.num_own_blocks for victim in victims)
        return (
            self.has_slot(sequence, left)
            and self.has_time(sequence, left, is_overdue=is_overdue)
            and self.has_room_now(sequence, left, given_up - growth_blocks)
            and self._has_room_later(sequence, left, given_up)
        )

    def _has_room_later(self, sequence: Sequence, running: list[Sequence], given_up: int = 0) -> bool:
        if sequence.promised_len or self._limits.admission is AdmissionRule.OPTIMISTIC:
            return True
        if self._ends_before_growth(sequence, running, given_up):
            return True
        # What ranks lower can be preempted, if it comes to that.
        lane = sequence.lane
        rivals = [other for other in running if other.account.lane <= lane]
        if not rivals:
            return True
        # What no single one of them gives back by ending: prefixes that several share.
        shared = max(0, self._blocks.num_live - given_up - sum([other.num_own_blocks for other in running]))
        shared += self._blocks.num_revived(sequence)
        reserve = self.reserve_for(sequence, running)
        return self._peak_with(sequence, rivals, shared) + reserve <= self._blocks.num_blocks

    def _ends_before_growth(self, sequence: Sequence, running: list[Sequence], given_up: int) -> bool:
        """Whether it ends with its first token after few steps, in which there is room for it and for what the others
        grow by: however full the pool is foreseen to be later, it is not there then."""
        few = len(sequence.token_ids) <= self._limits.max_step_tokens
        return few and not sequence.will_decode and self.has_room_now(sequence, running, given_up - len(running))

    def _is_alone(self, sequence: Sequence, running: Iterable[Sequence]) -> bool:
        """Whether no other sequence of the lower lanes runs."""
        return all(other is sequence or other.lane is Lane.INTERACTIVE for other in running)

    def _peak_with(self, sequence: Sequence, running: list[Sequence], shared: int) -> float:
        everyone = [*running, sequence]
        generated = np.array([s.num_output for s in everyone])
        most = np.array([s.sampling.max_tokens for s in everyone]) - generated
        mean, variance = np.empty(len(everyone)), np.empty(len(everyone))
        lanes = [s.account.lane for s in everyone]
        if min(lanes) is max(lanes):
            mean, variance = self.output_lengths[lanes[0]].remaining(generated)
        else:
            for lane in LANES:
                rows = np.array(lanes) == lane
                mean[rows], variance[rows] = self.output_lengths[lane].remaining(generated[rows])
        # What max_tokens cuts off varies no more than up to there.
        remaining = np.minimum(mean, most)
        variance = np.minimum(variance, np.square(most - remaining))
        own = np.array([s.num_own_blocks for s in running] + [self._blocks.num_fresh(sequence)])
        return peak_blocks(own, remaining, variance, shared=shared, block_size=self._blocks.block_size)
