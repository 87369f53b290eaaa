"""Spans and the closing log line of a choice say what its timeline says, and never what the choice was about."""

import json

import pytest
import structlog
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.worker.front.front_rig import PROMPT, TOKENIZER
from tests.worker.front.timed_front import TimedFront
from trunkline.v1.generation_pb2 import Lane
from trunkline.v1.worker_pb2 import Submit
from trunkline_runtime.telemetry import genai

TRACE_ID, ROUTER, EARLIER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", "00f067aa0ba902b8"


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """The spans of the test. The process's own provider stays unchanged."""
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return exporter


def traced_submit() -> Submit:
    return Submit(traceparent=f"00-{TRACE_ID}-{ROUTER}-01", tenant="acme", lane=Lane.LANE_INTERACTIVE)


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def duration_s(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


async def test_a_choices_spans_are_its_phases(exporter: InMemorySpanExporter) -> None:
    timed = TimedFront(traced_submit())
    for n in range(4):
        timed.step(5 + n, finish=n == 3)
    spans = by_name(exporter)
    assert list(spans) == ["queue", "prefill", "decode", "worker.generate"]
    whole = spans["worker.generate"]
    assert whole.parent is not None
    assert (trace.format_span_id(whole.parent.span_id), trace.format_trace_id(whole.parent.trace_id)) == (
        ROUTER,
        TRACE_ID,
    )
    for name in ("queue", "prefill", "decode"):
        parent = spans[name].parent
        assert parent is not None
        assert parent.span_id == whole.context.span_id
    lengths = [duration_s(span) for span in spans.values()]
    assert lengths == pytest.approx([0.25, 0.75, 3.0, 4.0], abs=1e-6)
    (chunk,) = spans["prefill"].events
    assert chunk.name == "chunk"
    assert dict(chunk.attributes or {}) == {
        "trunkline.duration_s": 0.5,
        "trunkline.tokens": len(PROMPT) - 1,
        "trunkline.step.prefill_tokens": len(PROMPT) - 1,
        "trunkline.step.decode_tokens": 0,
        "trunkline.step.padding_tokens": 0,
        "trunkline.step.sequences": 1,
    }
    assert (spans["decode"].attributes or {})["trunkline.decode_steps"] == 3
    attributes = dict(whole.attributes or {})
    assert attributes[genai.USAGE_INPUT_TOKENS] == len(PROMPT)
    assert attributes[genai.USAGE_OUTPUT_TOKENS] == 4
    assert attributes[genai.USAGE_CACHE_READ_INPUT_TOKENS] == 1
    assert attributes[genai.RESPONSE_FINISH_REASONS] == ("length",)
    assert attributes["trunkline.tenant"] == "acme"


async def test_long_gaps_are_events_of_the_decode(exporter: InMemorySpanExporter) -> None:
    timed = TimedFront(traced_submit())
    timed.step(5)
    timed.now_s += 2.0  # the worker has no target, so gaps of more than a second are noted
    timed.step(5)
    timed.step(5, finish=True)
    (gap,) = by_name(exporter)["decode"].events
    assert (gap.name, dict(gap.attributes or {})) == ("gap", {"trunkline.duration_s": 3.0})


async def test_sampled_steps_and_the_time_to_make_text_are_told_with_the_decode(exporter: InMemorySpanExporter) -> None:
    timed = TimedFront(traced_submit())
    timed.tick_s = 1 / 1024
    for n in range(40):
        timed.step(5, finish=n == 39)
    spans = by_name(exporter)
    assert list(spans) == ["queue", "prefill", "decode", "detokenize", "worker.generate"]
    (step,) = [event for event in spans["decode"].events if event.name == "step"]
    assert dict(step.attributes or {}) == {
        "trunkline.duration_s": 0.5,
        "trunkline.step.prefill_tokens": 0,
        "trunkline.step.decode_tokens": 1,
        "trunkline.step.padding_tokens": 0,
        "trunkline.step.sequences": 1,
    }
    assert (spans["decode"].attributes or {})["trunkline.detokenize_s"] == pytest.approx(40 / 1024)
    assert duration_s(spans["detokenize"]) == pytest.approx(40 / 1024, abs=1e-6)
    assert dict(spans["detokenize"].attributes or {}) == {"trunkline.aggregated": True}


async def test_the_queue_of_a_choice_says_how_long_it_awaited_a_resource(exporter: InMemorySpanExporter) -> None:
    timed = TimedFront(traced_submit())
    timed.step(5, finish=True, awaited_s=0.125)
    assert timed.timeline.awaited_s == 0.125
    assert dict(by_name(exporter)["queue"].attributes or {}) == {"trunkline.awaited_s": 0.125}


async def test_a_resumed_choice_links_to_the_earlier_attempt(exporter: InMemorySpanExporter) -> None:
    submit = traced_submit()
    submit.resume.output_token_ids.append(9)
    submit.resume.traceparent = f"00-{TRACE_ID}-{EARLIER}-01"
    timed = TimedFront(submit)
    timed.step(5, finish=True)
    whole = by_name(exporter)["worker.generate"]
    assert [trace.format_span_id(link.context.span_id) for link in whole.links] == [EARLIER]
    assert (whole.attributes or {})["trunkline.ledger_tokens"] == 1


async def test_a_choice_that_was_never_admitted_has_only_waited(exporter: InMemorySpanExporter) -> None:
    timed = TimedFront(traced_submit())
    timed.now_s += 5.0
    assert timed.choice is not None
    timed.front.cancel(timed.choice)
    spans = by_name(exporter)
    assert list(spans) == ["queue", "worker.generate"]
    assert duration_s(spans["queue"]) == pytest.approx(5.0)
    assert (spans["worker.generate"].attributes or {})["trunkline.outcome"] == "cancelled"


async def test_a_choice_that_is_not_sampled_has_no_spans(exporter: InMemorySpanExporter) -> None:
    timed = TimedFront(Submit(traceparent=f"00-{TRACE_ID}-{ROUTER}-00"))
    timed.step(5, finish=True)
    assert not exporter.get_finished_spans()


async def test_the_closing_line_has_the_timeline() -> None:
    with structlog.testing.capture_logs() as lines:
        timed = TimedFront(traced_submit())
        timed.step(5)
        timed.now_s += 2.0
        timed.step(5)
        timed.step(5, finish=True)
    (line,) = (line for line in lines if line["event"] == "choice ended")
    for name, value in {
        "request_id": "r", "tenant": "acme", "lane": "interactive", "outcome": "length", "trace_id": TRACE_ID,
        "queue_ms": 250.0, "prefill_ms": [500.0], "prefill_tokens": [len(PROMPT) - 1], "first_token_ms": 1000.0,
        "gaps_ms": [[4000.0, 3000.0]], "num_gaps": 1, "duration_ms": 5000.0, "device_ms": 1500.0,
        "prompt_tokens": len(PROMPT), "cached_tokens": 1, "output_tokens": 3,
    }.items():  # fmt: skip
        assert line[name] == value, name


async def test_no_report_quotes_the_choice(exporter: InMemorySpanExporter) -> None:
    """The prompt's and the output's words and token ids are nowhere."""
    secret = TOKENIZER.encode(" princess castle dragon").ids
    with structlog.testing.capture_logs() as lines:
        timed = TimedFront(traced_submit(), stop=["dragon"])
        for token_id in secret:
            if timed.front.num_choices:
                timed.step(token_id, finish=token_id == secret[-1])
    assert timed.reader.text
    said = json.dumps(lines) + "".join(span.to_json() for span in exporter.get_finished_spans())
    for word in ("princess", "castle", "dragon", "Once", "upon"):
        assert word not in said
