"""A sequence: one choice of one request, from submission to its last token."""

from dataclasses import dataclass, field
from enum import Enum

from trunkline_worker.cache.prefix_tree import Node
from trunkline_worker.lanes.fair_share import Account
from trunkline_worker.lanes.lanes import Lane
from trunkline_worker.step.plan import PositionLogprobs, Sampling


class Finish(Enum):
    """Why a sequence ended, as far as the engine decides it (stop strings are found by the front)."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(slots=True, eq=False)
class Sequence:
    """Two counters catch up with the tokens; there is no prefill or decode phase.

    num_computed <= num_scheduled <= len(token_ids) + num_pending: what is between the first two is in flight.
    """

    sequence_id: int
    token_ids: list[int]  # prompt, then output
    prompt_len: int
    sampling: Sampling
    root: Node  # of the prefix tree: the fingerprint and the salt
    arrival: int  # order of submission; older ones have precedence
    account: Account  # of its tenant in its lane
    arrival_s: float = 0.0
    deadline_s: float | None = None  # when it is of no use any more, on the clock of arrival_s

    num_computed: int = 0  # tokens whose KV is in the block table
    num_scheduled: int = 0  # these, and those that a step in flight computes
    num_pending: int = 0  # tokens that steps in flight sample
    last_step: int = 0  # the latest step that computes any of it
    block_table: list[int] = field(default_factory=list)
    num_matched: int = 0  # leading blocks that were found in the cache at admission
    num_reused: int = 0  # tokens in them
    generation: int = 0  # grows with each preemption
    has_yielded: bool = False  # it was preempted for another tenant of its lane, and has not been let in again
    num_charged: int = 0  # leading tokens that count as its tenant's input: see fair_share.py
    promised_len: int = 0  # up to this length it keeps its blocks, whoever else wants them: see aging.py

    # Identity of its blocks: see blocks.py
    packed: list[bytes] = field(default_factory=list)  # tokens of its full blocks, as far as they were asked for
    digests: list[bytes] = field(default_factory=list)  # of the same blocks
    num_published: int = 0  # leading blocks that carry an identity (or lost it to a collision)
    chain: Node | None = None  # node of the last published block
    found: list[Node] = field(default_factory=list)  # the longest cached prefix when it was last looked for
    num_known_cached: int = 0  # while it waits: tokens in them, as its lane counts them
    num_announced: int = 0  # leading blocks that others were told would be computed: see shared_prefixes.py
    is_watched: bool = False  # while it waits, for its deadline

    cached_tokens: int | None = None  # found in the cache at the first admission
    reported: bool = False  # what is known of the prompt has been handed out
    prompt_logprobs: list[PositionLogprobs] | None = None  # of prompt positions 1.. as far as computed

    # When things happened, on the clock of arrival_s: see stats.py
    admitted_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None

    # Derived once: they are asked for in every step.
    last_to_compute: int = 0  # tokens that are computed in all: the last one of the output is sampled, never computed
    end_token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self.last_to_compute = self.prompt_len + self.sampling.max_tokens - 1
        self.end_token_ids = self.sampling.end_token_ids

    @property
    def lane(self) -> Lane:
        return self.account.lane

    @property
    def rank(self) -> tuple[int, int]:
        """Precedence where two sequences want one block. It never changes, so of two sequences only ever one can
        evict the other."""
        return (self.account.lane, self.arrival)

    @property
    def is_aged(self) -> bool:
        """Whether it is still within what it was promised."""
        return self.num_scheduled < self.promised_len

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def num_unscheduled(self) -> int:
        return len(self.token_ids) + self.num_pending - self.num_scheduled

    @property
    def will_decode(self) -> bool:
        """Whether it takes part in more steps once all its known tokens are computed."""
        return len(self.token_ids) < self.last_to_compute

    @property
    def num_own_blocks(self) -> int:
        """Blocks that it brought into use: an upper bound of what its end gives back."""
        return len(self.block_table) - self.num_matched

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt positions still have to be computed for their log-probabilities."""
        return self.sampling.prompt_logprobs is not None and self.num_output == 0

    @property
    def may_use_cache(self) -> bool:
        return not self.wants_prompt_logprobs
