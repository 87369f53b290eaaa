"""Whether a waiting sequence may join the running set now: places, time, KV blocks, and what all will still need.

Part of the places and of the KV pool is reserved for the interactive lane. Sequences of lower lanes do not use it, with
one exception: a sequence that runs without another of those lanes may use everything. So the reserve keeps out no
sequence that fits the pool.

What all will still need is a forecast, after LightLLM's past-future scheduler (Gong et al., ASPLOS 2025). The output
length of each sequence is estimated from sequences that have ended, among them those that became as long. All sequences
grow by a token per step, and a sequence frees its blocks when it ends; so the most blocks are needed at the end of one.
"""

from collections.abc import Iterable
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from trunkline_worker.cache.blocks import KVBlocks
from trunkline_worker.cache.sequence import Sequence
from trunkline_worker.scheduler.limits import AdmissionRule, SchedulerLimits
from trunkline_worker.scheduler.step_cost import LEAST_ADDED_SHARE, StepCost, StepLoad
from trunkline_worker.step.lanes import LANES, Lane

# Margin, in standard deviations of the sum of the lengths. With 1.5 about one forecast in fifteen is too low.
SAFETY_DEVIATIONS = 1.5
# Buckets of lengths grow by a factor of about 1.19, up to 2^20 tokens.
BUCKETS_PER_OCTAVE = 4
OCTAVES = 20
HALF_LIFE = 1024  # in ended sequences: an observation this old counts half
# Prior: this many sequences of exponentially distributed length.
PRIOR_COUNT = 4.0
PRIOR_MEAN_TOKENS = 256.0
LOWER_LANES_DECODE_SHARE = 0.5  # of a step's target time
# Sequences that end within so many steps are not kept out by the forecast alone. Longer ones would take what it keeps
# for others, and tenants whose steps bring many tokens would gain most.
FEW_STEPS = 32
STRETCHED_TARGETS = 2.0  # how long overdue sequences may make a step, in target times: see aging.Overdue


def peak_blocks(
    own: NDArray[np.int64],
    remaining: NDArray[np.float64],
    variance: NDArray[np.float64],
    *,
    shared: int,
    block_size: int,
) -> float:
    """The most live blocks at any moment, if no other sequence is admitted.

    own: blocks that only this sequence holds; remaining: tokens that it will still add; variance: of `remaining`;
    shared: live blocks that no single sequence frees by ending. All arrays [num_sequences].
    """
    if not len(own):
        return float(shared)
    order = np.argsort(remaining)
    own, remaining, variance = own[order], remaining[order], variance[order]
    alive = np.arange(len(own), 0, -1)  # at the end of the k-th one, it and all that end later hold their blocks
    held = np.cumsum(own[::-1])[::-1]
    spread = np.sqrt(np.cumsum(variance[::-1])[::-1])
    # Half a block is added for each: a sequence's last block is half full on average.
    needed = held + alive * (remaining / block_size + 0.5) + SAFETY_DEVIATIONS * spread / block_size
    return shared + float(needed.max())


class Resource(IntEnum):
    """What sequences share. The numbers are indices of shares.Demand."""

    PLACES = 0
    BLOCKS = 1
    TIME = 2  # of a step, that decodes take


class OutputLengths:
    """A decaying histogram of output lengths, and the remaining length for each number of tokens generated so far."""

    def __init__(self) -> None:
        steps = np.arange(BUCKETS_PER_OCTAVE * OCTAVES + 1) / BUCKETS_PER_OCTAVE
        # Bucket i holds lengths in (edges[i-1], edges[i]]; small ones one length each.
        self._edges: NDArray[np.float64] = np.unique(np.ceil(2.0**steps))
        lower = np.concatenate(([0.0], self._edges[:-1]))
        self._middle = (lower + 1 + self._edges) / 2
        self._counts = PRIOR_COUNT * (np.exp(-lower / PRIOR_MEAN_TOKENS) - np.exp(-self._edges / PRIOR_MEAN_TOKENS))
        self._weight = 1.0  # of the next observation: it grows, so that the others need not be scaled down
        self._mean: NDArray[np.float64] = np.empty(0)
        self._variance: NDArray[np.float64] = np.empty(0)
        self._stale = True

    def observe(self, length: int) -> None:
        """Counts a sequence that was not aborted and ended after `length` output tokens, at least 1."""
        self._weight *= 2 ** (1 / HALF_LIFE)
        index = int(np.searchsorted(self._edges, length))
        self._counts[min(index, len(self._counts) - 1)] += self._weight
        if self._weight > 1e9:
            self._counts /= self._weight
            self._weight = 1.0
        self._stale = True

    def remaining(self, generated: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean (at least 1) and variance of the tokens still to come, for each number generated; all arrays [n]."""
        if self._stale:
            self._refresh()
        index = np.minimum(np.searchsorted(self._edges, generated, side="right"), len(self._edges) - 1)
        return np.maximum(self._mean[index] - generated, 1.0), self._variance[index]

    def _refresh(self) -> None:
        """Recomputes the moments of the total length, given that it lies in a bucket or beyond."""

        def tail(values: NDArray[np.float64]) -> NDArray[np.float64]:
            return np.cumsum(values[::-1])[::-1]

        total = tail(self._counts) + 1e-12
        mean = tail(self._counts * self._middle) / total
        square = tail(self._counts * self._middle**2) / total
        self._mean = np.maximum(mean, self._middle)
        self._variance = np.maximum(square - mean**2, 0.0)
        self._stale = False


class Admission:
    """Decides from its arguments and from the output lengths that it has learned, by lane."""

    def __init__(self, limits: SchedulerLimits, blocks: KVBlocks, cost: StepCost) -> None:
        self._cost = cost
        self._limits = limits
        self._blocks = blocks
        self._reserved_blocks = int(blocks.num_blocks * limits.interactive_reserve)
        self.output_lengths = [OutputLengths() for _ in LANES]
        # Set when a sequence was kept out only because no step that large has been measured: the next step may show
        # that there is time.
        self.is_cautious = False

    def fits(self, sequence: Sequence, running: list[Sequence], *, is_overdue: bool) -> bool:
        """Whether a sequence may join now. KVBlocks.match() must just have been called.

        is_overdue: its lane is overdue, and it may stretch steps
        """
        return (
            self.has_slot(sequence, running)
            and self.has_time(sequence, running, is_overdue=is_overdue)
            and self.has_blocks(sequence, running)
        )

    def is_stretched(self, lane: Lane, running: list[Sequence]) -> bool:
        """Whether decodes make steps take longer than a lane allows."""
        decodes = [s for s in running if s.will_decode and (lane or s.lane is not Lane.STANDARD)]
        if not decodes or not self._cost.is_known:
            return False
        alone_s = self._cost.time_s(StepLoad(1, 0, 0.0))
        tokens = sum([len(sequence.token_ids) for sequence in decodes])
        added_s = self._cost.time_s(StepLoad(len(decodes), tokens, 0.0)) - alone_s
        return added_s > self._time_to_add_s(lane, alone_s)

    def has_slot(self, sequence: Sequence, running: list[Sequence]) -> bool:
        """Whether the running set has a place for a sequence. There are no more places than tokens in a step, so every
        running sequence advances in every step."""
        if len(running) >= self.places(Lane.INTERACTIVE):
            return False
        if sequence.lane is Lane.INTERACTIVE or not self._limits.interactive_reserve:
            return True
        lower = sum(1 for other in running if other.lane is not Lane.INTERACTIVE)
        return lower < self.places(sequence.lane)

    def places(self, lane: Lane) -> int:
        """The most sequences of a lane and the lower ones that run at once."""
        limits = self._limits
        if lane is Lane.INTERACTIVE:
            return min(limits.max_running_requests, limits.max_step_tokens)
        places = limits.max_running_requests - limits.reserved_running_requests
        return min(places, limits.max_step_tokens - limits.reserved_step_tokens)

    def pool_blocks(self, lane: Lane) -> int:
        """The most blocks that a lane can have, at least one."""
        return max(1, self._blocks.num_blocks - (self._reserved_blocks if lane else 0))

    def decode_time(self, lane: Lane) -> tuple[float, float]:
        """The parts of a lane's step time that a decoding sequence takes and that each token of its context adds; zeros
        if steps have no target time or their cost is not known yet."""
        target_s, cost = self._limits.itl_target_s, self._cost
        if not target_s or not cost.is_known:
            return 0.0, 0.0
        alone_s = cost.time_s(StepLoad(1, 0, 0.0))
        added_s = self._time_to_add_s(lane, alone_s) - self._time_for_experts_s(alone_s)
        return cost.token_s / added_s, cost.kv_token_s / added_s

    def _time_to_add_s(self, lane: Lane, alone_s: float) -> float:
        """The time that others may add to a step which takes `alone_s` for one sequence."""
        share = 1.0 if lane is Lane.INTERACTIVE else LOWER_LANES_DECODE_SHARE
        step_s, experts_s = self._cost.within_s(self._limits.itl_target_s), self._time_for_experts_s(alone_s)
        return max(share * (step_s - alone_s - experts_s), LEAST_ADDED_SHARE * alone_s) + experts_s

    def _time_for_experts_s(self, alone_s: float) -> float:
        """The time that others add to such a step by using all experts, which they soon do. 0 if steps then miss their
        target: fewer sequences may run."""
        experts_s = self._cost.other_experts_s(1)
        return experts_s if alone_s + experts_s < self._cost.within_s(self._limits.itl_target_s) else 0.0

    def foreseen_blocks(self, sequences: list[Sequence], lane: Lane, *, waits: bool) -> list[float]:
        """For each sequence, the forecast of the blocks of its own at its end; with optimistic admission, the blocks it
        holds, or takes when it is admitted.

        waits: the sequences wait, and KVBlocks.match() must just have been called
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
        """Whether a step stays under its target time with one more decoding sequence. Decodes of the lower lanes use
        half of the time that others may add. The other half is left for prompts, so an interactive prompt takes few
        steps, however much bulk work runs. A target that one sequence alone misses does not shut the others out.

        A sequence that ends with its first token decodes in no step. One that streams already may continue, unless it
        was preempted for another tenant. An overdue one may stretch the time, unless a higher lane runs; bulk work
        waits for as long as it takes. Steps that the standard lane has stretched do not count against the interactive
        lane: otherwise its sequences would preempt others that then come back.
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
        """Blocks that must stay available when this sequence takes some: those promised to an aged sequence, and the
        part of the interactive lane's reserve that this lane does not hold itself."""
        promised = [other for other in running if other.promised_len and other is not sequence]
        reserve = sum([self._blocks.num_missing(other, other.promised_len) for other in promised])
        if sequence.lane is Lane.INTERACTIVE or not self._reserved_blocks:
            return reserve
        if sequence.promised_len or self._is_alone(sequence, running):
            return reserve
        held = sum(other.num_own_blocks for other in running if other.lane is Lane.INTERACTIVE)
        return reserve + max(0, self._reserved_blocks - held)

    def has_blocks(self, sequence: Sequence, running: list[Sequence]) -> bool:
        """Whether the known tokens of a sequence fit, and the running set with it is not forecast to outgrow the pool.
        KVBlocks.match() must just have been called."""
        return self.has_room_now(sequence, running) and self._has_room_later(sequence, running)

    def has_room_now(self, sequence: Sequence, running: list[Sequence], given_up: int = 0) -> bool:
        """Whether the known tokens of a sequence fit, and the tokens it was promised.

        given_up: blocks to count as free in addition
        """
        reserve = self.reserve_for(sequence, running) - given_up
        if sequence.promised_len:
            growth = self._blocks.blocks_for(sequence.promised_len) - self._blocks.blocks_for(len(sequence.token_ids))
            return self._blocks.can_admit(sequence, reserve + growth)
        return self._blocks.can_admit(sequence, reserve)

    def missing_without(
        self,
        victims: list[Sequence],
        sequence: Sequence,
        running: list[Sequence],
        *,
        is_overdue: bool,
        retiring_blocks: int = 0,
        growth_blocks: int = 0,
    ) -> Resource | None:
        """What would keep a sequence out if the victims were preempted, retiring blocks were free, and running
        sequences had the blocks that they need to grow; None: it would fit."""
        gone = set(map(id, victims))
        left = [other for other in running if id(other) not in gone]
        given_up = retiring_blocks + sum(victim.num_own_blocks for victim in victims)
        if not self.has_slot(sequence, left):
            return Resource.PLACES
        if not self.has_time(sequence, left, is_overdue=is_overdue):
            return Resource.TIME
        has_room = self.has_room_now(sequence, left, given_up - growth_blocks)
        return None if has_room and self._has_room_later(sequence, left, given_up) else Resource.BLOCKS

    def _has_room_later(self, sequence: Sequence, running: list[Sequence], given_up: int = 0) -> bool:
        if sequence.promised_len or self._limits.admission is AdmissionRule.OPTIMISTIC:
            return True
        if self._ends_before_growth(sequence, running, given_up):
            return True
        # Sequences of lower rank do not count: they can be preempted when the pool runs dry.
        lane = sequence.lane
        rivals = [other for other in running if other.account.lane <= lane]
        if not rivals:
            return True
        # Blocks that no single sequence gives back by ending: prefixes that several share.
        shared = max(0, self._blocks.num_live - given_up - sum([other.num_own_blocks for other in running]))
        shared += self._blocks.num_revived(sequence)
        reserve = self.reserve_for(sequence, running)
        return self._peak_with(sequence, rivals, shared) + reserve <= self._blocks.num_blocks

    def _ends_before_growth(self, sequence: Sequence, running: list[Sequence], given_up: int) -> bool:
        """Whether a sequence ends within FEW_STEPS, before the pool is forecast to be full: there is room now for all
        that it and the others add until then, one token in each step."""
        num_tokens, blocks_for = len(sequence.token_ids), self._blocks.blocks_for
        own = blocks_for(sequence.last_to_compute) - blocks_for(num_tokens)
        num_steps = self._prompt_steps(sequence, running) + sequence.last_to_compute - num_tokens
        grown = own + len(running) * blocks_for(num_steps)
        return num_steps <= FEW_STEPS and self.has_room_now(sequence, running, given_up - grown)

    def _prompt_steps(self, sequence: Sequence, running: list[Sequence]) -> int:
        """In about how many steps the prompt of a waiting sequence is computed, after those that have been begun."""
        num_tokens = self._blocks.num_fresh(sequence) * self._blocks.block_size
        num_tokens += sum([max(0, len(other.token_ids) - other.num_scheduled) for other in running])
        most, target_s = self._limits.max_step_tokens, self._limits.itl_target_s
        if target_s and self._cost.is_known:
            most = min(most, self._cost.longest_chunk((1.0 - LOWER_LANES_DECODE_SHARE) * target_s, 0))
        return -(-num_tokens // max(1, most))

    def _is_alone(self, sequence: Sequence, running: Iterable[Sequence]) -> bool:
        """Whether no other sequence of the lower lanes runs."""
        return all(other is sequence or other.lane is Lane.INTERACTIVE for other in running)

    def _peak_with(self, sequence: Sequence, running: list[Sequence], shared: int) -> float:
        sequences = [*running, sequence]
        generated = np.array([s.num_output for s in sequences])
        most = np.array([s.sampling.max_tokens for s in sequences]) - generated
        mean, variance = np.empty(len(sequences)), np.empty(len(sequences))
        lanes = [s.account.lane for s in sequences]
        if min(lanes) is max(lanes):
            mean, variance = self.output_lengths[lanes[0]].remaining(generated)
        else:
            for lane in LANES:
                rows = np.array(lanes) == lane
                mean[rows], variance[rows] = self.output_lengths[lane].remaining(generated[rows])
        # max_tokens bounds the remaining length, and so how far it can vary.
        remaining = np.minimum(mean, most)
        variance = np.minimum(variance, np.square(most - remaining))
        own = np.array([s.num_own_blocks for s in running] + [self._blocks.num_fresh(sequence)])
        return peak_blocks(own, remaining, variance, shared=shared, block_size=self._blocks.block_size)
