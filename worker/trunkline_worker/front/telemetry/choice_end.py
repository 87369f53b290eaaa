"""What is known of a choice when it has ended: its line in the log and its spans."""

from dataclasses import dataclass
from typing import Any

from opentelemetry.trace import Span, Status, StatusCode, format_trace_id
from opentelemetry.util.types import AttributeValue

from trunkline.v1.worker_pb2 import Gap, PrefillChunk, SampledStep, Timeline
from trunkline_runtime.telemetry import genai
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
    admitted_s = timeline.admitted_s if timeline.HasField("admitted_s") else None
    first_token_s = timeline.first_token_s if timeline.HasField("first_token_s") else None
    ended_ns = unix_ns(timeline.ended_s)
    queued_until_ns = ended_ns if admitted_s is None else unix_ns(admitted_s)
    add_child(span, "queue", received_ns, queued_until_ns)
    if admitted_s is not None:
        prefilled_ns = ended_ns if first_token_s is None else unix_ns(first_token_s)
        chunks = (
            timeline.chunks if first_token_s is None else [c for c in timeline.chunks if c.started_s < first_token_s]
        )
        facts: dict[str, AttributeValue] = {
            "trunkline.chunks": len(chunks),
            "trunkline.computed_tokens": sum(chunk.tokens for chunk in chunks),
            "trunkline.cached_tokens": timeline.cached_tokens,
        }
        add_child(
            span,
            "prefill",
            unix_ns(admitted_s),
            prefilled_ns,
            facts,
            [SpanEvent("chunk", unix_ns(chunk.started_s), _of_chunk(chunk)) for chunk in chunks],
        )
    if first_token_s is not None:
        decoding_s = timeline.ended_s - first_token_s
        facts = {
            "trunkline.decode_steps": timeline.decode_steps,
            "trunkline.gaps": timeline.num_gaps,
            "trunkline.longest_gap_s": timeline.longest_gap_s,
            "trunkline.preemptions": timeline.preemptions,
            "trunkline.recomputed_tokens": timeline.recomputed_tokens,
            "trunkline.detokenize_s": timeline.detokenize_s,
        }
        if timeline.decode_steps:
            facts["trunkline.time_per_output_token_s"] = decoding_s / timeline.decode_steps
        again = [c for c in timeline.chunks if c.started_s >= first_token_s]
        events = [SpanEvent("gap", unix_ns(gap.at_s), _of_gap(gap)) for gap in timeline.gaps]
        events += [SpanEvent("chunk", unix_ns(chunk.started_s), _of_chunk(chunk)) for chunk in again]
        events += [SpanEvent("step", unix_ns(step.at_s), _of_step(step)) for step in timeline.sampled_steps]
        events.sort(key=lambda event: event.unix_ns)
        decode = add_child(span, "decode", unix_ns(first_token_s), ended_ns, facts, events)
        if timeline.detokenize_s:  # in one piece; in truth it is spread over the decode
            text_end_ns = unix_ns(min(first_token_s + timeline.detokenize_s, timeline.ended_s))
            add_child(decode, "detokenize", unix_ns(first_token_s), text_end_ns, {"trunkline.aggregated": True})
    span.set_attributes(_of_choice(end))
    if end.is_error:
        span.set_status(Status(StatusCode.ERROR, end.outcome))
    span.end(ended_ns)


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


def _of_chunk(chunk: PrefillChunk) -> dict[str, AttributeValue]:
    return {
        "trunkline.duration_s": chunk.duration_s,
        "trunkline.tokens": chunk.tokens,
        "trunkline.step.prefill_tokens": chunk.step_prefill_tokens,
        "trunkline.step.decode_tokens": chunk.step_decode_tokens,
        "trunkline.step.padding_tokens": chunk.step_padding_tokens,
        "trunkline.step.sequences": chunk.step_sequences,
    }


def _of_step(step: SampledStep) -> dict[str, AttributeValue]:
    return {
        "trunkline.duration_s": step.duration_s,
        "trunkline.step.prefill_tokens": step.prefill_tokens,
        "trunkline.step.decode_tokens": step.decode_tokens,
        "trunkline.step.padding_tokens": step.padding_tokens,
        "trunkline.step.sequences": step.sequences,
    }


def _of_gap(gap: Gap) -> dict[str, AttributeValue]:
    return {"trunkline.duration_s": gap.duration_s}
