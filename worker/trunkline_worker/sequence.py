"""A sequence: one choice of one request, from submission to its last token."""

from dataclasses import dataclass, field
from enum import Enum

from trunkline_worker.plan import PositionLogprobs, Sampling
from trunkline_worker.prefix_tree import Node


class Finish(Enum):
    """Why a sequence ended, as far as the engine decides it (stop strings are found by the front)."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(slots=True, eq=False)
class Sequence:
    """One counter, `num_computed`, catches up with `token_ids`; there is no prefill or decode phase."""

    sequence_id: int
    token_ids: list[int]  # prompt, then output
    prompt_len: int
    sampling: Sampling
    root: Node  # of the prefix tree: the fingerprint and the salt
    arrival: int  # order of submission; older ones have precedence

    num_computed: int = 0  # tokens whose KV is in the block table
    block_table: list[int] = field(default_factory=list)
    generation: int = 0  # grows with each preemption

    # Identity of its blocks: see blocks.py
    digests: list[bytes] = field(default_factory=list)
    num_published: int = 0  # leading blocks that carry an identity (or lost it to a collision)
    chain: Node | None = None  # node of the last published block
    num_announced: int = 0  # leading blocks that others were told would be computed: see scheduler.py

    cached_tokens: int | None = None  # found in the cache at the first admission
    reported: bool = False  # what is known of the prompt has been handed out
    prompt_logprobs: list[PositionLogprobs] | None = None  # of prompt positions 1.. as far as computed

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt positions still have to be computed for their log-probabilities."""
        return self.sampling.prompt_logprobs is not None and self.num_output == 0

    @property
    def may_use_cache(self) -> bool:
        return not self.wants_prompt_logprobs
