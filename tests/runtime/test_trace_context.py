"""Which trace a request belongs to, and whether it is sampled."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased

from trunkline_runtime.telemetry.otel_variables import VariableError
from trunkline_runtime.telemetry.trace_context import (
    MAX_TRACESTATE,
    HeadSampler,
    TraceContext,
    head_sampler,
    new_request_id,
    new_span_id,
    random_int,
    trace_context,
)

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize("flags", ["00", "01"])
def test_a_context_is_read_and_written(flags: str) -> None:
    traceparent = f"00-{TRACE_ID}-{SPAN_ID}-{flags}"
    context = trace_context(f" {traceparent}\t", "vendor=1,other=2")
    assert context is not None
    assert context == (int(TRACE_ID, 16), int(SPAN_ID, 16), flags == "01", "vendor=1,other=2")
    assert context.traceparent == traceparent


@pytest.mark.parametrize(
    ("traceparent", "is_valid"),
    [
        (f"01-{TRACE_ID}-{SPAN_ID}-01-more", True),
        (f"00-{TRACE_ID}-{SPAN_ID}-ff", True),
        (f"00-{TRACE_ID}-{SPAN_ID}-01-more", False),
        (f"ff-{TRACE_ID}-{SPAN_ID}-01", False),
        (f"00-{'0' * 32}-{SPAN_ID}-01", False),
        (f"00-{TRACE_ID}-{'0' * 16}-01", False),
        (f"00-{TRACE_ID.upper()}-{SPAN_ID}-01", False),
        (f"00-{TRACE_ID}-{SPAN_ID}-01\n", False),
        ("", False),
        ("nonsense", False),
    ],
)
def test_what_makes_no_sense_is_no_context(traceparent: str, is_valid: bool) -> None:
    assert (trace_context(traceparent) is not None) == is_valid


@pytest.mark.parametrize("state", ["\x00", "=", "a" * (MAX_TRACESTATE + 1)])
def test_a_state_that_makes_no_sense_is_left_out(state: str) -> None:
    context = trace_context(f"00-{TRACE_ID}-{SPAN_ID}-01", state)
    assert context is not None
    assert context.tracestate == ""


def test_ids_have_their_width_when_written() -> None:
    assert TraceContext(1, 2, True).traceparent == f"00-{1:032x}-{2:016x}-01"
    assert 0 < new_span_id() < 1 << 64


@pytest.mark.parametrize(
    ("name", "ratio", "without", "below_sampled", "below_unsampled"),
    [
        ("", "", True, True, False),
        ("always_on", "", True, True, True),
        ("always_off", "", False, False, False),
        ("traceidratio", "0.0", False, False, False),
        ("parentbased_always_off", "", False, True, False),
        ("parentbased_traceidratio", "1.0", True, True, False),
        ("parentbased_traceidratio", "", True, True, False),
    ],
)
def test_the_sampler_follows_its_variables(
    monkeypatch: pytest.MonkeyPatch, name: str, ratio: str, without: bool, below_sampled: bool, below_unsampled: bool
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", name)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", ratio)
    sampler = head_sampler()
    decided = [sampler.samples(1 << 127, parent) for parent in (None, True, False)]
    assert decided == [without, below_sampled, below_unsampled]


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 1.0])
def test_a_ratio_samples_the_traces_that_opentelemetrys_own_sampler_does(ratio: float) -> None:
    theirs, ours = TraceIdRatioBased(ratio), HeadSampler(ratio)
    step = (1 << 64) // 97
    for trace_id in (*range(1, 1 << 64, step), (1 << 128) - 1, 1 << 127):
        wanted = theirs.should_sample(None, trace_id, "a").decision is Decision.RECORD_AND_SAMPLE
        assert ours.samples(trace_id, None) == wanted


def test_a_caller_that_is_not_followed_cannot_choose_an_id_that_is_sampled() -> None:
    for trace_id in (1 << 64, (1 << 128) - 1):
        samplers = [HeadSampler(0.1, is_parent_based=False) for _ in range(10_000)]
        assert 0.05 < sum(sampler.samples(trace_id, parent=True) for sampler in samplers) / 10_000 < 0.15


def test_all_requests_of_a_trace_are_sampled_or_none() -> None:
    sampler = HeadSampler(0.5, is_parent_based=False)
    decided = [{sampler.samples(trace_id, parent=True) for _ in range(5)} for trace_id in range(1, 1001)]
    assert all(len(each) == 1 for each in decided)
    assert 400 < sum(each == {True} for each in decided) < 600


@pytest.mark.parametrize("ratio", ["-0.1", "1.1", "nan", "half"])
def test_a_ratio_that_is_none_is_told(monkeypatch: pytest.MonkeyPatch, ratio: str) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", ratio)
    with pytest.raises(VariableError, match=r"allowed: 0\.0 to 1\.0"):
        head_sampler()


def test_ids_are_different_on_all_threads() -> None:
    with ThreadPoolExecutor(4) as threads:
        drawn = threads.map(lambda _: [new_request_id() for _ in range(2000)], range(4))
        ids = [one for each in drawn for one in each]
    assert len(set(ids)) == 8000
    assert {len(one) for one in ids} == {32}
    assert 0.4 < sum(random_int(63) >> 62 for _ in range(2000)) / 2000 < 0.6
