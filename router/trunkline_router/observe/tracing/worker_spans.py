"""The spans of a worker's choices, made from its timelines: for requests of which it exports no spans itself."""

from operator import itemgetter

from trunkline.v1.worker_pb2 import Gap, PrefillChunk, SampledStep, Timeline
from trunkline_router.observe.tracing.request_attributes import Attributes
from trunkline_router.observe.tracing.trace_builder import TraceBuilder
from trunkline_router.record.request_record import AttemptRecord
from trunkline_runtime.telemetry import genai
from trunkline_runtime.telemetry.otlp_spans import span_attributes

AGGREGATED = span_attributes({"trunkline.aggregated": True})
MOST_CHOICES = 4  # of an attempt, whose spans are made


def add_worker_spans(trace: TraceBuilder, attempt: AttemptRecord) -> None:
    """Adds worker.generate and its phases for the first choices. Their names are the worker's own."""
    for choice, timeline in enumerate(attempt.timelines[:MOST_CHOICES]):
        record = trace.record
        received_s = record.started_s + (timeline.received.ToNanoseconds() - record.started_unix_ns) / 1e9
        facts: Attributes = {
            "trunkline.request_id": record.request_id,
            "trunkline.worker": attempt.worker,
            "trunkline.from_timeline": True,
            "trunkline.device_s": timeline.device_s,
            "trunkline.cached_tokens": timeline.cached_tokens,
        }
        facts |= genai.spelled({genai.USAGE_CACHE_READ_INPUT_TOKENS: timeline.cached_tokens})
        if len(attempt.timelines) > 1:
            facts["trunkline.part"] = choice
        span_id = trace.add(
            "worker.generate", attempt.span_id, received_s, received_s + timeline.ended_s, span_attributes(facts)
        )
        _add_phases(trace, span_id, received_s, timeline)


def _add_phases(trace: TraceBuilder, parent_id: int, received_s: float, timeline: Timeline) -> None:
    ended_s = received_s + timeline.ended_s
    if not timeline.HasField("admitted_s"):
        trace.add("queue", parent_id, received_s, ended_s)
        return
    admitted_s = received_s + timeline.admitted_s
    trace.add("queue", parent_id, received_s, admitted_s)
    first_s = received_s + timeline.first_token_s if timeline.HasField("first_token_s") else ended_s
    chunks = [chunk for chunk in timeline.chunks if received_s + chunk.started_s < first_s]
    facts: Attributes = {
        "trunkline.chunks": len(chunks),
        "trunkline.computed_tokens": sum(chunk.tokens for chunk in chunks),
        "trunkline.cached_tokens": timeline.cached_tokens,
    }
    events = [trace.event("chunk", received_s + chunk.started_s, of_chunk(chunk)) for chunk in chunks]
    trace.add("prefill", parent_id, admitted_s, first_s, span_attributes(facts), *events)
    if not timeline.HasField("first_token_s"):
        return
    facts = {
        "trunkline.decode_steps": timeline.decode_steps,
        "trunkline.gaps": timeline.num_gaps,
        "trunkline.longest_gap_s": timeline.longest_gap_s,
        "trunkline.preemptions": timeline.preemptions,
        "trunkline.recomputed_tokens": timeline.recomputed_tokens,
        "trunkline.detokenize_s": timeline.detokenize_s,
    }
    told = [(gap.at_s, "gap", of_gap(gap)) for gap in timeline.gaps]
    told += [(step.at_s, "step", of_step(step)) for step in timeline.sampled_steps]
    told.sort(key=itemgetter(0))
    events = [trace.event(name, received_s + at_s, of) for at_s, name, of in told]
    decode_id = trace.add("decode", parent_id, first_s, ended_s, span_attributes(facts), *events)
    if timeline.detokenize_s:  # in one piece; in truth it is spread over the decode
        text_end_s = min(first_s + timeline.detokenize_s, ended_s)
        trace.add("detokenize", decode_id, first_s, text_end_s, AGGREGATED)


def of_gap(gap: Gap) -> Attributes:
    return {"trunkline.duration_s": gap.duration_s}


def of_step(step: SampledStep) -> Attributes:
    return {
        "trunkline.duration_s": step.duration_s,
        "trunkline.step.prefill_tokens": step.prefill_tokens,
        "trunkline.step.decode_tokens": step.decode_tokens,
        "trunkline.step.padding_tokens": step.padding_tokens,
        "trunkline.step.sequences": step.sequences,
    }


def of_chunk(chunk: PrefillChunk) -> Attributes:
    return {
        "trunkline.duration_s": chunk.duration_s,
        "trunkline.tokens": chunk.tokens,
        "trunkline.step.prefill_tokens": chunk.step_prefill_tokens,
        "trunkline.step.decode_tokens": chunk.step_decode_tokens,
        "trunkline.step.padding_tokens": chunk.step_padding_tokens,
        "trunkline.step.sequences": chunk.step_sequences,
    }
