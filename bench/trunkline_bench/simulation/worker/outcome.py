"""Outcomes of requests, taken from an engine's steps."""

from collections.abc import Sequence
from dataclasses import dataclass

from trunkline.engine.v1.engine_pb2 import EngineStep
from trunkline_bench.simulation.traces.trace_request import TraceRequest


@dataclass(slots=True)
class Outcome:
    """The outcome of one request. Times are seconds since the run's start, as the sender of the request sees them."""

    request: TraceRequest
    first_token_s: float | None = None
    done_s: float | None = None
    output_tokens: int = 0
    cached_tokens: int = 0  # of the prompt
    refused: str = ""  # the reason
    retry_delay_s: float = 0.0

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.request.arrival_s

    def refuse(self, reason: str, at_s: float, retry_delay_s: float = 0.0) -> None:
        self.refused, self.done_s, self.retry_delay_s = reason, at_s, retry_delay_s


def record(step: EngineStep, at_s: float, outcomes: Sequence[Outcome]) -> None:
    """Adds a step's outputs to the outcomes, which are indexed by handle. at_s: time at which they arrive."""
    for output in step.outputs:
        outcome = outcomes[output.handle]
        outcome.output_tokens += len(output.token_ids)
        if output.HasField("prompt"):
            outcome.first_token_s = at_s
            outcome.cached_tokens = output.prompt.cached_tokens
        if output.HasField("error"):
            outcome.refuse(output.error.reason, at_s, output.error.retry_delay_ms / 1e3)
        elif output.finish_reason:
            outcome.done_s = at_s
    for handle in step.token_handles:
        outcomes[handle].output_tokens += 1
