"""What is known of a choice when it has ended, and its line in the log."""

from dataclasses import dataclass
from typing import Any

from opentelemetry.trace import Span, format_trace_id

from trunkline.v1.worker_pb2 import Timeline
from trunkline_worker.lanes.lanes import Lane

MILLISECONDS = 1e3


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """Never holds content: neither tokens nor text."""

    request_id: str
    tenant: str
    lane: Lane
    outcome: str  # a finish reason, "cancelled", or a reason of the error table in capitals
    prompt_tokens: int
    ledger_tokens: int  # output tokens of other workers that came with the submit
    output_tokens: int  # with those of the ledger
    timeline: Timeline
    span: Span

    @property
    def is_error(self) -> bool:
        return self.outcome.isupper()

    def log_fields(self) -> dict[str, Any]:
        """The fields of the closing log line: the whole timeline. Times in milliseconds; fields that only unusual
        choices have are left out otherwise."""
        timeline = self.timeline
        fields: dict[str, Any] = {
            "request_id": self.request_id,
            "tenant": self.tenant,
            "lane": self.lane.name.lower(),
            "outcome": self.outcome,
            "trace_id": format_trace_id(self.span.get_span_context().trace_id),
            "duration_ms": _ms(timeline.ended_s),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": timeline.cached_tokens,
            "output_tokens": self.output_tokens,
            "device_ms": _ms(timeline.device_s),
        }
        waited_s = timeline.admitted_s if timeline.HasField("admitted_s") else timeline.ended_s
        fields["queue_ms"] = _ms(waited_s)
        if timeline.chunks:
            fields["prefill_ms"] = [_ms(chunk.duration_s) for chunk in timeline.chunks]
            fields["prefill_tokens"] = [chunk.tokens for chunk in timeline.chunks]
        if timeline.HasField("first_token_s"):
            fields["first_token_ms"] = _ms(timeline.first_token_s)
        if self.ledger_tokens:
            fields["ledger_tokens"] = self.ledger_tokens
        if timeline.num_gaps:
            fields["num_gaps"] = timeline.num_gaps
            fields["gaps_ms"] = [[_ms(gap.at_s), _ms(gap.duration_s)] for gap in timeline.gaps]
        if timeline.preemptions:
            fields["preemptions"] = timeline.preemptions
            fields["recomputed_tokens"] = timeline.recomputed_tokens
        return fields


def _ms(seconds: float) -> float:
    return round(seconds * MILLISECONDS, 1)
