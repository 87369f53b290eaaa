"""What is known of a choice when it has ended: its line in the log and its spans."""

from dataclasses import dataclass
from typing import Any

from opentelemetry.trace import Span, Status, StatusCode, format_trace_id
from opentelemetry.util.types import AttributeValue

from trunkline.v1.worker_pb2 import Timeline
from trunkline_runtime.telemetry import genai
from trunkline_runtime.telemetry.timeline_phases import phases_of
from trunkline_runtime.tracing import SpanEvent, add_child
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


def end_spans(end: ChoiceEnd) -> None:
    """Ends the choice's span, with spans of its phases under it. Nothing but the end is done if it is not recorded."""
    timeline, span = end.timeline, end.span
    received_ns = timeline.received.ToNanoseconds()

    def unix_ns(time_s: float) -> int:
        return received_ns + int(time_s * 1e9)

    if not span.is_recording():
        span.end()
        return
    parent = span
    for phase in phases_of(timeline):
        parent = add_child(
            parent if phase.is_part else span,
            phase.name,
            unix_ns(phase.start_s),
            unix_ns(phase.end_s),
            phase.attributes,
            [SpanEvent(name, unix_ns(at_s), attributes) for at_s, name, attributes in phase.events],
        )
    span.set_attributes(_of_choice(end))
    if end.is_error:
        span.set_status(Status(StatusCode.ERROR, end.outcome))
    span.end(unix_ns(timeline.ended_s))


def _of_choice(end: ChoiceEnd) -> dict[str, AttributeValue]:
    timeline = end.timeline
    usage: dict[str, AttributeValue] = {
        genai.USAGE_INPUT_TOKENS: end.prompt_tokens,
        genai.USAGE_OUTPUT_TOKENS: end.output_tokens,
        genai.USAGE_CACHE_READ_INPUT_TOKENS: timeline.cached_tokens,
    }
    if not end.is_error:
        usage[genai.RESPONSE_FINISH_REASONS] = [end.outcome]
    return {
        **genai.spelled(usage),
        "trunkline.prompt_tokens": end.prompt_tokens,
        "trunkline.cached_tokens": timeline.cached_tokens,
        "trunkline.output_tokens": end.output_tokens,
        "trunkline.ledger_tokens": end.ledger_tokens,
        "trunkline.device_s": timeline.device_s,
        "trunkline.outcome": end.outcome,
    }
