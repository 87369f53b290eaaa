"""A sequence: one choice of one request, from submission to its last token."""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from trunkline_worker.cache.prefix_tree import Node
from trunkline_worker.step.fair_share import Account
from trunkline_worker.step.lanes import Lane
from trunkline_worker.step.plan import PositionLogprobs, Sampling


class Finish(Enum):
    """Why a sequence ended, as far as the engine decides it (stop strings are found by the front)."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class StepMark(NamedTuple):
    """The end of a committed step. All sequences that got a token from a step refer to one object, so identity tells
    whether two tokens are of consecutive steps."""

    done_s: float
    device_s_per_token: float  # summed over all steps up to this one


class AwaitedResource(NamedTuple):
    """What a sequence cannot be computed without, and that may not be there yet."""

    kind: str  # such as "grammar"
    name: bytes  # such as its digest


@dataclass(slots=True, eq=False)
class Sequence:
    """Two counters advance towards the number of tokens; there is no prefill or decode phase.

    num_computed <= num_scheduled <= len(token_ids) + num_pending; the tokens between the first two are in flight.

    While a run (step/plan.py) is in flight, num_pending counts its tokens, but not the one that is sampled after them:
    the counters are equal, and no further step is planned.
    """

    sequence_id: int
    token_ids: list[int]  # prompt, then output
    prompt_len: int
    sampling: Sampling
    root: Node  # of the prefix tree: the fingerprint and the salt
    arrival: int  # order of submission; older sequences have precedence
    account: Account  # of its tenant in its lane
    arrival_s: float = 0.0
    deadline_s: float | None = None  # for its first token, on the clock of arrival_s

    num_computed: int = 0  # tokens whose KV is in the block table
    num_scheduled: int = 0  # num_computed and the tokens that steps in flight compute
    num_pending: int = 0  # tokens that steps in flight sample, or those of a run in flight
    last_step: int = 0  # the latest step that computes any of its tokens
    block_table: list[int] = field(default_factory=list)
    num_matched: int = 0  # leading blocks that were found in the cache at admission
    num_reused: int = 0  # tokens in them
    generation: int = 0  # grows with each preemption
    len_at_admission: int = 0  # tokens that it had when it was last admitted
    has_yielded: bool = False  # it was preempted for another tenant of its lane, and has not been admitted again
    num_charged: int = 0  # leading tokens that count as its tenant's input: see fair_share.py
    promised_len: int = 0  # up to this length it keeps its blocks, whichever sequence wants them: see aging.py

    # Identity of its blocks: see blocks.py
    packed: list[bytes] = field(default_factory=list)  # tokens of its full blocks, as far as they were needed
    digests: list[bytes] = field(default_factory=list)  # of the same blocks
    num_published: int = 0  # leading blocks that carry an identity (or lost it to a collision)
    chain: Node | None = None  # node of the last published block
    found: list[Node] = field(default_factory=list)  # the longest cached prefix at its last lookup
    num_known_cached: int = 0  # while it waits: tokens in them, as its lane counts them
    num_announced: int = 0  # leading blocks announced as being computed: see ComputingPrefixes
    is_watched: bool = False  # while it waits: whether Waiting.by_deadline has it
    ticket: int = 0  # while it may be admitted: names its entries in the order of the queue
    awaits: frozenset[AwaitedResource] = frozenset()  # while it waits: without these it cannot be admitted
    awaits_since_s: float = 0.0  # while it awaits any
    awaited_s: float = 0.0  # for how long it has awaited any, without the present time

    cached_tokens: int | None = None  # found in the cache at the first admission
    reported: bool = False  # its PromptOutput has been returned
    prompt_logprobs: list[PositionLogprobs] | None = None  # of prompt positions 1.. as far as computed

    # Times of its events, on the clock of arrival_s: see stats.py
    admitted_s: float | None = None
    first_token_s: float | None = None
    last_token: StepMark | None = None  # the step of its latest output token
    num_evicted: int = 0  # leading tokens whose KV preemptions took

    # Derived once: they are needed in every step.
    # Tokens that are computed in total: the prompt, and the output but for its last token, which is only sampled.
    last_to_compute: int = 0
    end_token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self.last_to_compute = self.prompt_len + max(0, self.sampling.max_tokens - 1)
        self.end_token_ids = self.sampling.end_token_ids

    @property
    def lane(self) -> Lane:
        return self.account.lane

    @property
    def rank(self) -> tuple[int, int]:
        """Precedence when two sequences want one block, lowest first. It never changes, so of two sequences only one
        can ever evict the other."""
        return (self.account.lane, self.arrival)

    @property
    def is_aged(self) -> bool:
        """Whether it has not reached the length up to which it keeps its blocks."""
        return self.num_scheduled < self.promised_len

    def fall_back(self, num_scheduled: int) -> None:
        """Counts tokens as not scheduled that a step computed for nothing. No later step computes any of the sequence.
        If it had reached its promise with them, the promise is fulfilled."""
        if not self.is_aged:
            self.promised_len = 0
        self.num_scheduled, self.num_pending = num_scheduled, 0

    @property
    def is_ready(self) -> bool:
        """Whether it waits, and awaits no resource."""
        return self.ticket > 0

    @property
    def owes_progress(self) -> bool:
        """Whether it was preempted, and has got no token since it was admitted again."""
        return self.generation > 0 and len(self.token_ids) == self.len_at_admission

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def num_unscheduled(self) -> int:
        return len(self.token_ids) + self.num_pending - self.num_scheduled

    @property
    def will_decode(self) -> bool:
        """Whether it takes part in further steps once all its known tokens are computed."""
        return len(self.token_ids) < self.last_to_compute

    @property
    def num_own_blocks(self) -> int:
        """Blocks that it brought into use: an upper bound of the blocks that its end frees."""
        return len(self.block_table) - self.num_matched

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt positions still have to be computed for their log-probabilities."""
        return self.sampling.prompt_logprobs is not None and self.num_output == 0

    @property
    def may_use_cache(self) -> bool:
        return not self.wants_prompt_logprobs and not self.sampling.needs_every_state
