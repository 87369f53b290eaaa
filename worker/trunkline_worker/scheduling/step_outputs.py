"""What a step produced, as the scheduler hands it to the engine."""

from dataclasses import dataclass, field

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


@dataclass(slots=True)
class StepOutputs:
    """What a step produced for all sequences. Most have one more token and nothing else: they are in two columns."""

    handles: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    special: list[StepOutput] = field(default_factory=list)
