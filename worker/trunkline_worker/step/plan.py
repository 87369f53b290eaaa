"""What the scheduler tells an executor to do in a step, the result, and the interface of executors.

A plan is plain, delta-encoded data: an executor keeps a row of state for each sequence it has been told of, and a plan
contains only the changes. That is sufficient for a rank that shares no memory with the scheduler.
"""

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import zip_longest
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from trunkline.sampling_params import SamplingNumbers

# Which tokens the samples of an entry may be, by index into the plan's `steps`: [num_samples, ceil(vocab / 32)] int32.
# Bit t % 32 of word t // 32 is set if token t may be chosen.
Masks = Mapping[int, NDArray[np.int32]]
NO_MASKS: Masks = {}


@dataclass(frozen=True, slots=True)
class Sampling(SamplingNumbers):
    """Resolved sampling parameters of one sequence. A temperature of 0 is greedy."""

    max_tokens: int  # bounded by context length and KV capacity already; 0: the output is whole, see StepResult.wholes
    seed: int = 0  # 64 bits, already mixed with the choice: see sampling_key.choice_seed
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    end_token_ids: frozenset[int] = frozenset()  # end-of-sequence (unless ignored) and stop tokens
    logprobs: int | None = None  # None: not asked for; k: the chosen token's and the k likeliest
    prompt_logprobs: int | None = None
    first_segment_tokens: int = 0  # of a prompt that is a pair of texts: see Submit; 0: the prompt is one text
    needs_every_state: bool = False  # the whole output is made of the states of all tokens of the prompt


@dataclass(frozen=True, slots=True)
class SequenceStart:
    """All that an executor needs to know of a sequence that starts: a new one, or one that was preempted."""

    sequence_id: int
    token_ids: list[int]  # prompt, then output so far
    prompt_len: int
    block_table: list[int]
    sampling: Sampling


class SequenceStep(NamedTuple):
    """A sequence's part in a step: tokens [num_computed, num_computed + num_new) are computed."""

    sequence_id: int
    generation: int  # grows with each preemption; results of another generation are stale
    num_computed: int
    num_new: int  # with those of a run
    new_blocks: Sequence[int]  # appended to the block table known so far (for a SequenceStart: already in it)
    samples: bool  # the last known token is computed, so the next one is sampled


class Run(NamedTuple):
    """Tokens that the host knows beyond a sequence's last one, which an entry computes together with that one.

    Forced tokens come first, and are taken as they are. The others are drafts: a draft is taken if it is the token that
    is sampled at its position, and all before it were taken. So a run never changes which tokens a sequence gets. The
    token after the last one that was taken is sampled too, unless `num_new` leaves the last forced token out.
    """

    token_ids: Sequence[int]
    num_forced: int
    num_new: int  # how many of them the step computes: all, or all but the last one if that is forced

    @classmethod
    def of(cls, token_ids: Sequence[int], num_forced: int = 0) -> "Run":
        """A run that is computed in full."""
        return cls(token_ids, num_forced, len(token_ids))

    def first(self, most: int) -> "Run | None":
        """As much of the run as a step takes that can compute `most` of its tokens; None: nothing of it. The first
        forced token is always taken: it need not be computed."""
        count = most + 1 if most < self.num_forced else most
        if count >= len(self.token_ids):
            return self._replace(num_new=min(self.num_new, most)) if self.token_ids else None
        return Run(self.token_ids[:count], min(self.num_forced, count), most) if count else None

    @property
    def num_samples(self) -> int:
        """Positions at which a token is sampled: those of the drafts and the one after them."""
        return self.num_new + 1 - self.num_forced

    def taken(self, sampled: Sequence[int | None]) -> list[int | None]:
        """The tokens that the sequence gets.  sampled: `num_samples` tokens; None: an error"""
        tokens: list[int | None] = [*self.token_ids[: self.num_forced]]
        for token_id, draft in zip_longest(sampled, self.token_ids[self.num_forced :]):
            tokens.append(token_id)
            if token_id != draft:
                break
        return tokens


@dataclass(frozen=True, slots=True)
class Padding:
    """What a step computes only to pad its batch."""

    num_tokens: int  # positions that go through every matrix product
    kv_tokens: int = 0  # keys and values that padding rows of decodes read
    pairs: float = 0.0  # (query, key) pairs of the padding of prompts


class Tier(IntEnum):
    """Where a pool of KV blocks is; numbers are those of trunkline.v1.CacheTier."""

    DEVICE = 1


class BlockPlace(NamedTuple):
    """A physical block."""

    tier: Tier
    block: int


class BlockCopy(NamedTuple):
    """The bytes of a whole block, as they are before the step that carries the copy, are written to another block."""

    copy_id: int
    source: BlockPlace
    target: BlockPlace


class CopyEnd(NamedTuple):
    """A copy that is no longer under way."""

    copy_id: int
    arrived: bool  # completely, and with the checksum of its source; if not, the target may hold anything


@dataclass(slots=True)  # not frozen: one is made for every step, and a frozen one takes three times as long
class StepPlan:
    """One step. Apply `ended`, then `starts`, then compute `steps` as one ragged batch in this order.

    A step may compute a token that the step before it samples: the executor has it in its row, the scheduler does not
    know it yet.

    A step has two parts, forward and sample. A mask may depend on all tokens before its sample, so the masks of
    `masked` are given to the second part. An entry without its mask is computed, but not sampled.

    Copies of blocks may end with a later step's result. A plan without `steps` is made when nothing can be computed
    while copies are under way: it is done when one of them has ended.
    """

    step_id: int
    steps: list[SequenceStep]
    starts: list[SequenceStart] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)  # finished, aborted or preempted: forget these rows
    padding: "Padding | None" = None  # of static batching
    masked: Sequence[int] = ()  # indices of `steps` that are sampled under a mask
    runs: Mapping[int, Run] = field(default_factory=dict)  # by index of `steps`
    copies: Sequence[BlockCopy] = ()  # of blocks, to blocks that no step uses before the copy has ended

    @property
    def needs_host(self) -> bool:
        """Whether the host gives something to the step between its two parts."""
        return bool(self.masked)

    @property
    def num_tokens(self) -> int:
        return sum([step.num_new for step in self.steps])

    @property
    def num_decodes(self) -> int:
        """Entries that compute one token and sample from it."""
        return len([step for step in self.steps if step.num_new == 1 and step.samples])

    @property
    def num_decode_tokens(self) -> int:
        """Tokens of decodes, and of runs."""
        count = self.num_decodes
        for index, run in self.runs.items():
            is_decode = self.steps[index].num_new == run.num_new + 1  # not the end of a prompt
            count += run.num_new + (is_decode and run.num_new > 0)
        return count

    @property
    def num_padding(self) -> int:
        return self.padding.num_tokens if self.padding else 0


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Log-probabilities (natural, of the unmodified distribution) at one position."""

    token_id: int  # the token at this position
    logprob: float
    rank: int  # 1: the likeliest
    top: list[tuple[int, float]]  # (token id, logprob), likeliest first


@dataclass(frozen=True, slots=True)
class RowError:
    """Why a step did not produce what a sequence asked for; the sequence ends with it."""

    reason: str  # for the client
    trace: str = ""  # a bug's traceback, for the log

    @classmethod
    def of_bug(cls, error: Exception) -> "RowError":
        """The error for an unexpected exception. Its text is for the log, not for the client."""
        return cls("an internal error; see the worker's log", "".join(traceback.format_exception(error)))


@dataclass(slots=True)  # not frozen: one is made for every step, and a frozen one takes three times as long
class StepResult:
    """What an executor returns for a plan; keys are indices into the plan's `steps`."""

    step_id: int
    token_ids: list[int | None]  # per entry of steps; None where it does not sample, has no mask, or has a run
    runs: dict[int, list[int]] = field(default_factory=dict)  # tokens that entries with runs get, one at least
    logprobs: dict[int, list[PositionLogprobs]] = field(default_factory=dict)  # of each token of an entry
    # Entry j of a list is for prompt position num_computed + 1 + j; positions past the prompt's end are left out.
    prompt_logprobs: dict[int, list[PositionLogprobs]] = field(default_factory=dict)
    # Whole outputs of sequences without output tokens, with the last token of the prompt: a vector, or scores.
    wholes: dict[int, list[float]] = field(default_factory=dict)
    errors: dict[int, RowError] = field(default_factory=dict)  # entries that end with this step
    device_time_s: float = 0.0
    num_padding: int = 0  # positions computed as padding, beyond the plan's own
    copies: list[CopyEnd] = field(default_factory=list)  # of this plan or of earlier ones, in any order
    expert_imbalance: tuple[float, ...] = ()  # of each layer, with steps that end a window: see model/expert_loads.py


class Executor(Protocol):
    """Computes steps one after the other, in the order of their plans: on a device, or in simulation.

    A step may be launched while earlier ones still run; steps are collected in the same order. If a plan needs the
    host, launch() starts its forward pass only, and sample() follows before the next launch() and before the step is
    collected.
    """

    @property
    def run_ahead(self) -> int:
        """How many steps may be in flight (launched and not collected) when the next one is planned."""

    def launch(self, plan: StepPlan) -> None:
        """Starts a step: the forward pass over the plan's tokens, then sampling. Returns at once if it can."""

    def sample(self, masks: Masks) -> None:
        """Starts the second part of the step launched last, whose plan needs the host. Returns at once if it can."""

    def is_done(self) -> bool:
        """Whether collect() would return at once."""

    def collect(self) -> StepResult:
        """Waits for the oldest step in flight, and returns its result."""
