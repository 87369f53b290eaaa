"""What a step produced, as the scheduler hands it to the engine."""

from dataclasses import dataclass, field
from typing import NamedTuple

from trunkline.status import RequestRefused
from trunkline_worker.cache.sequence import Finish
from trunkline_worker.step.plan import PositionLogprobs


@dataclass(frozen=True, slots=True)
class PromptOutput:
    """What is known of a prompt when its first output token is sampled."""

    num_tokens: int
    cached_tokens: int
    logprobs: list[PositionLogprobs] | None  # of prompt positions 1..


@dataclass(slots=True)
class StepOutput:
    """What a step produced for one sequence."""

    sequence_id: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish: Finish | None = None
    stop_token_id: int | None = None
    prompt: PromptOutput | None = None  # with the first output token
    error: RequestRefused | None = None
    trace: str = ""  # for the log: traceback of the bug that caused `error`, if one did


class Chunk(NamedTuple):
    """A sequence's part in a step that computed more than its next token."""

    sequence_id: int
    num_tokens: int
    num_recomputed: int  # of them: tokens whose KV a preemption had taken


class LateToken(NamedTuple):
    """A token, not the first, whose sequence got none from the step before."""

    sequence_id: int
    since_s: float  # when the step of the token before was done
    # Device time per token, in seconds, summed over the steps since then that decoded none of the sequence.
    skipped_s: float


@dataclass(slots=True)
class StepOutputs:
    """What a step produced for all sequences. Most have one more token and nothing else: they are in two columns."""

    handles: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    special: list[StepOutput] = field(default_factory=list)
    num_regular: int = 0  # tokens that follow a token of the step before
    chunks: list[Chunk] = field(default_factory=list)
    late: list[LateToken] = field(default_factory=list)
