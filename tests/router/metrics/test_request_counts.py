"""What is counted of requests when they end."""

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from tests.router.metrics.records import (
    CHAT,
    NOW_UNIX_S,
    answered,
    attempt,
    counts,
    plan,
    refused,
    timeline,
    value,
    values,
)
from trunkline.status import DEADLINE_EXCEEDED, INTERNAL, NO_WORKER, OVERLOADED, QUOTA_EXCEEDED
from trunkline.v1.worker_pb2 import OutputKind
from trunkline_router.observe.metrics.request_metrics import phases_of
from trunkline_router.observe.recent.recent_requests import RecentRequests
from trunkline_router.record.request_observer import RequestObserver
from trunkline_router.record.request_record import (
    CANCELLED,
    MOST_TIMELINES,
    Interval,
    PlacementRecord,
)
from trunkline_runtime.telemetry.exposition import content_type_of, exposition


def test_requests_are_counted_by_model_lane_endpoint_and_outcome() -> None:
    counted = counts()
    for outcome in ("stop", "stop,length", NO_WORKER, CANCELLED, "UNKNOWN", "a new finish reason"):
        counted.request_ended(answered(outcome=outcome))
    counted.request_ended(answered(endpoint="/v1/../secret"))
    found = values(counted.families, "trunkline_router_requests_total", "endpoint", "outcome")
    assert found == {
        (CHAT, "stop"): 1,
        (CHAT, "several"): 1,
        (CHAT, NO_WORKER): 1,
        (CHAT, CANCELLED): 1,
        (CHAT, "other"): 2,
        ("other", "stop"): 1,
    }


def test_calls_of_tools_are_counted_by_whether_they_are_complete() -> None:
    counted = counts()
    counted.request_ended(answered())
    assert not values(counted.families, "trunkline_router_tool_calls_total")
    counted.request_ended(answered(tool_calls=3, complete_tool_calls=2))
    counted.request_ended(answered(tool_calls=1, complete_tool_calls=1))
    found = values(counted.families, "trunkline_router_tool_calls_total", "model_name", "kind")
    assert found == {("tiny", "complete"): 3, ("tiny", "cut_off"): 1}


def test_tenants_are_told_what_they_had_and_what_it_cost() -> None:
    counted = counts()
    counted.request_ended(answered())
    for reason in (OVERLOADED, QUOTA_EXCEEDED, INTERNAL, DEADLINE_EXCEEDED, "UNKNOWN", CANCELLED):
        counted.request_ended(refused(reason))
    results = values(counted.families, "trunkline_router_tenant_requests_total", "tenant", "result")
    assert results == {("acme", "ok"): 1, ("acme", "refused"): 2, ("acme", "failed"): 3, ("acme", "cancelled"): 1}
    tokens = values(counted.families, "trunkline_router_tenant_tokens_total", "kind")
    assert tokens == {("prompt_computed",): 300, ("prompt_cached",): 100, ("output",): 11}
    assert value(counted.families, "trunkline_router_tenant_device_seconds_total") == pytest.approx(0.2)
    for name in ("trunkline_router_tenant_cost_total", "trunkline_router_cost_total"):
        assert value(counted.families, name) == pytest.approx(0.2 * 3.6 / 3600)
    assert value(counted.families, "trunkline_router_tenant_first_token_seconds_count") == 1


def test_the_phases_of_the_first_token_add_up_to_its_time() -> None:
    lost = attempt(1.01, first_output_s=None, last_output_s=None, ended_s=1.21, ended=NO_WORKER, timelines=[])
    placements = [PlacementRecord(Interval(*times), plan()) for times in ((1.005, 1.01), (1.21, 1.23))]
    record = answered(placements=placements, attempts=[lost, attempt(1.23)], first_token_s=1.34, ended_s=1.9)
    spent = dict(phases_of(record))
    assert sum(spent.values()) == pytest.approx(0.34)
    assert list(spent) == ["admission", "tokenize", "place", "failover", "worker_queue", "prefill", "delivery"]
    expected = {"admission": 0.001, "tokenize": 0.003, "place": 0.025, "failover": 0.2, "worker_queue": 0.02}
    assert {phase: spent[phase] for phase in expected} == pytest.approx(expected)
    assert spent["prefill"] == pytest.approx(0.08)


def test_a_phase_never_takes_more_than_there_is() -> None:
    record = answered(attempts=[attempt(timelines=[timeline(admitted_s=90.0, first_token_s=91.0)])])
    spent = dict(phases_of(record))
    assert sum(spent.values()) == pytest.approx(0.12)
    assert min(spent.values()) >= 0.0
    untold = answered(attempts=[attempt(timelines=[])])
    assert dict(phases_of(untold))["worker"] == pytest.approx(0.11)
    assert phases_of(refused(NO_WORKER)) == []


def test_predictions_are_compared_with_what_became_of_them() -> None:
    counted = counts()
    counted.request_ended(answered())
    worker = "trunkline_router_worker_"
    assert value(counted.families, f"{worker}first_tokens_total") == 1
    assert value(counted.families, f"{worker}first_token_seconds_total") == pytest.approx(0.11)
    assert value(counted.families, f"{worker}predicted_first_token_seconds_total") == pytest.approx(0.08)
    assert value(counted.families, f"{worker}first_token_error_seconds_total") == pytest.approx(0.03)
    assert value(counted.families, "trunkline_router_first_token_prediction_ratio_count") == 1
    decisions = values(counted.families, "trunkline_router_route_decisions_total", "policy", "reason")
    assert decisions == {("predicted-ttft", "soonest"): 1}
    assert value(counted.families, "trunkline_router_route_prompt_tokens_total") == 400


def test_the_prediction_for_several_inputs_is_of_the_last_ones_output_everywhere() -> None:
    record = answered(inputs=3, choices=3, placements=[PlacementRecord(Interval(1.005, 1.009), plan(), 0.5)])
    counted, recent = counts(), RecentRequests()
    counted.request_ended(record)
    recent.request_ended(record)
    assert value(counted.families, "trunkline_router_worker_first_token_seconds_total") == pytest.approx(0.6)
    assert recent.predicted()["w0"].real_p50_s == pytest.approx(0.6)
    rest = answered(inputs=3, choices=3, attempts=[attempt(resumed_at_tokens=0)])
    counted.request_ended(rest)
    assert value(counted.families, "trunkline_router_worker_first_tokens_total") == 1, "the rest was not predicted"


def test_silences_are_zero_before_the_first_failover_so_that_rates_see_it() -> None:
    counted = counts()
    counted.request_ended(answered())
    assert value(counted.families, "trunkline_router_failover_silence_seconds_count") == 0


def test_failovers_and_retries_are_told_apart() -> None:
    counted = counts()
    full = attempt(1.01, first_output_s=None, last_output_s=None, ended_s=1.02, ended=OVERLOADED, timelines=[])
    lost = attempt(1.02, last_output_s=1.4, ended_s=1.41, ended=NO_WORKER)
    resumed = attempt(1.5, resumed_at_tokens=5, clock_skew_s=-0.25)
    counted.request_ended(answered(attempts=[full, lost, resumed]))
    assert values(counted.families, "trunkline_router_retries_total", "reason") == {(OVERLOADED,): 1}
    assert values(counted.families, "trunkline_router_failovers_total", "reason") == {(NO_WORKER,): 1}
    assert value(counted.families, "trunkline_router_failover_silence_seconds_sum") == pytest.approx(1.61 - 1.4)
    ended = values(counted.families, "trunkline_router_worker_attempts_total", "outcome")
    assert ended == {(OVERLOADED,): 1, (NO_WORKER,): 1, ("complete",): 1}
    assert value(counted.families, "trunkline_router_worker_clock_skew_seconds") == -0.25


@pytest.mark.parametrize(
    ("endpoint", "output", "operation"),
    [
        ("/pooling", OutputKind.OUTPUT_KIND_SCORE, "score"),
        ("/pooling", OutputKind.OUTPUT_KIND_VECTOR, "embeddings"),
        ("/v2/rerank", OutputKind.OUTPUT_KIND_UNSPECIFIED, "score"),
        ("trunkline.v1.InferenceService/Score", OutputKind.OUTPUT_KIND_UNSPECIFIED, "score"),
        ("/v1/completions", OutputKind.OUTPUT_KIND_UNSPECIFIED, "text_completion"),
    ],
)
def test_the_operation_is_what_workers_are_asked_for(
    endpoint: str, output: "OutputKind.ValueType", operation: str
) -> None:
    counted = counts()
    counted.request_ended(answered(endpoint=endpoint, output=output))
    assert values(counted.families, "gen_ai_server_request_duration_seconds_count", "gen_ai_operation_name") == {
        (operation,): 1
    }


def test_the_conventions_for_generative_ai_have_their_histograms() -> None:
    counted = counts()
    counted.request_ended(answered())
    counted.request_ended(refused(NO_WORKER))
    errors = values(counted.families, "gen_ai_server_request_duration_seconds_count", "error_type")
    assert errors == {("",): 1, (NO_WORKER,): 1}
    assert value(counted.families, "gen_ai_server_time_to_first_token_seconds_sum") == pytest.approx(0.12)
    assert value(counted.families, "gen_ai_server_time_per_output_token_seconds_sum") == pytest.approx(0.05)
    names = values(counted.families, "gen_ai_server_time_to_first_token_seconds_count", "gen_ai_operation_name")
    assert names == {("chat",): 1}
    assert value(counted.families, "vllm:request_params_max_tokens_sum") == 64
    assert value(counted.families, "vllm:request_max_num_generation_tokens_sum") == 11


def test_a_request_of_many_choices_keeps_few_timelines_and_all_of_its_cost() -> None:
    counted = counts()
    record = answered(attempts=[attempt(timelines=[timeline(device_s=0.25) for _ in range(1000)])])
    observer = RequestObserver(listeners=[counted.request_ended])
    begun = observer.begin(record)
    cost = record.cost
    observer.end(record, begun)
    assert len(record.attempts[0].timelines) == MOST_TIMELINES
    assert (record.cost, record.attempts[0].device_s) == (cost, 250.0)
    assert value(counted.families, "trunkline_router_tenant_device_seconds_total") == 250.0


def test_a_client_that_does_not_read_does_not_make_the_fleet_look_full() -> None:
    counted = counts()
    counted.request_ended(answered(outcome=OVERLOADED, fell_behind=True))
    counted.request_ended(refused(OVERLOADED))
    outcomes = values(counted.families, "trunkline_router_requests_total", "outcome")
    assert outcomes == {("SLOW_READER",): 1, (OVERLOADED,): 1}
    results = values(counted.families, "trunkline_router_tenant_requests_total", "result")
    assert results == {("refused",): 2}


async def test_latencies_carry_the_trace_of_an_example_in_openmetrics() -> None:
    counted = counts()
    counted.request_ended(answered())
    counted.request_ended(answered(is_sampled=True, is_exported=False, trace_id=0x123))
    counted.request_ended(
        answered(is_sampled=False, is_exported=True, trace_id=0xDEF, first_token_s=61.0, ended_s=62.0)
    )
    body = await exposition(counted.families(), content_type_of("application/openmetrics-text"))
    families = {family.name: family for family in parse_openmetrics(body.decode())}  # type: ignore[no-untyped-call]
    for name in (
        *("trunkline_router_first_token_seconds", "trunkline_router_request_seconds"),
        *("trunkline_router_token_gap_seconds", "gen_ai_server_request_duration_seconds"),
        *("gen_ai_server_time_to_first_token_seconds", "gen_ai_server_time_per_output_token_seconds"),
    ):
        told = [sample.exemplar for sample in families[name].samples if sample.exemplar is not None]
        traces = {exemplar.labels["trace_id"] for exemplar in told}
        assert traces <= {f"{0xABC:032x}", f"{0xDEF:032x}"}, "a trace that is not exported cannot be looked up"
        assert traces, name
        assert {float(exemplar.timestamp) for exemplar in told} == {NOW_UNIX_S}
    slow = families["trunkline_router_first_token_seconds"].samples
    assert any(s.exemplar and s.exemplar.labels["trace_id"] == f"{0xDEF:032x}" and s.exemplar.value == 60 for s in slow)
