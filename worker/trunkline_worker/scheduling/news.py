"""What the scheduler has to tell about sequences after a step."""

from dataclasses import dataclass, field

from trunkline.status import RequestRefused
from trunkline_worker.cache.sequence import Finish
from trunkline_worker.step.plan import PositionLogprobs


@dataclass(frozen=True, slots=True)
class PromptNews:
    """What is known of a prompt once its first output token is there."""

    num_tokens: int
    cached_tokens: int
    logprobs: list[PositionLogprobs] | None  # of prompt positions 1..


@dataclass(slots=True)
class SequenceNews:
    """What a step produced for one sequence."""

    sequence_id: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish: Finish | None = None
    stop_token_id: int | None = None
    prompt: PromptNews | None = None  # with the first output token
    error: RequestRefused | None = None
    trace: str = ""  # of the bug that caused `error`, where one did: for the log


@dataclass(slots=True)
class StepNews:
    """What a step produced. Most sequences have one more token and nothing else to tell: they are in two columns."""

    handles: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    special: list[SequenceNews] = field(default_factory=list)
