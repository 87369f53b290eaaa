"""What a worker's /metrics says: vLLM's names exactly, the values of timelines, and a bounded number of series."""

import json
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest
from opentelemetry.trace import INVALID_SPAN
from prometheus_client.core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from trunkline.engine.v1.engine_pb2 import EngineOutput, EngineStep, StepRecord
from trunkline.v1.generation_pb2 import PromptReport
from trunkline.v1.worker_pb2 import GetModelResponse, LoadSample, PrefillChunk, Timeline
from trunkline_runtime.telemetry.exposition import content_type_of, exposition
from trunkline_worker.front.telemetry.timeline import ChoiceEnd
from trunkline_worker.front.telemetry.worker_metrics import WorkerMetrics
from trunkline_worker.step.lanes import LANES, Lane

LISTED = json.loads((Path(__file__).parent / "vllm_metrics.json").read_text())
MODEL = GetModelResponse(model="demo", block_size=16, kv_blocks=200, context_length=150, price_per_hour=3.6)
NOW_S = 1000.0


def ended(outcome: str = "length", tenant: str = "acme", lane: Lane = Lane.STANDARD) -> ChoiceEnd:
    timeline = Timeline(
        admitted_s=1.0, first_token_s=3.0, ended_s=13.0, decode_steps=10, device_s=0.5, cached_tokens=16, preemptions=1,
        recomputed_tokens=4, chunks=[PrefillChunk(started_s=1.0, duration_s=2.0, tokens=84)],
    )  # fmt: skip
    return ChoiceEnd("r", tenant, lane, outcome, 100, 0, 11, timeline, INVALID_SPAN)


def lived() -> WorkerMetrics:
    """Metrics after two steps, one first token and one end."""
    metrics = WorkerMetrics(MODEL)
    load = LoadSample(
        running=3, waiting=2, kv_live_blocks=50, kv_cached_blocks=100, kv_free_blocks=50, waiting_by_lane=[0, 2, 0]
    )
    metrics.take_step(
        EngineStep(
            load=load,
            outputs=[EngineOutput(handle=1, token_ids=[5])],
            compile_outcomes=["compiled", "harmful", "compiled"],
            compile_s=[0.25, 1.5, 0.5],
            lost_grammar_processes=2,
            record=StepRecord(
                done_s=NOW_S, device_s=0.2, host_s=0.001, prefill_tokens=84, padding_tokens=3, sequences=1
            ),
        )
    )
    metrics.first_token(Lane.STANDARD, 3.0, PromptReport(prompt_tokens=100, cached_tokens=16))
    record = StepRecord(
        done_s=NOW_S + 0.03, device_s=0.02, host_s=0.001, decode_tokens=4, sequences=4, regular_tokens=3,
        late_handles=[9], late_since_s=[NOW_S - 4.0], late_skipped_s=[0.0],
    )  # fmt: skip
    metrics.take_step(
        EngineStep(load=load, token_handles=[1, 2, 3, 9], token_ids=[5] * 4, preempted_handles=[9, 9], record=record)
    )
    metrics.refused(Lane.BATCH)
    metrics.choice_ended(ended())
    return metrics


async def families(metrics: WorkerMetrics) -> dict[str, Metric]:
    """The families of an answer, read by the library's parser."""
    body = await exposition(metrics.families(NOW_S + 0.03), content_type_of(""))
    return {family.name: family for family in parse_text(body.decode())}


def value(found: dict[str, Metric], name: str, sample: str = "", **labels: str) -> float:
    """The one sample of a family with these labels."""
    (one,) = [
        s.value for s in found[name].samples if s.name == f"{name}{sample}" and labels.items() <= s.labels.items()
    ]
    return one


async def test_names_labels_and_buckets_are_those_of_vllm() -> None:
    found = {name: family for name, family in (await families(lived())).items() if name.startswith("vllm:")}
    assert set(found) == set(LISTED["metrics"])
    for name, listed in LISTED["metrics"].items():
        family = found[name]
        assert family.type == listed["type"], name
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert labels == set(listed["labels"]), name
        if listed["type"] == "histogram":
            bounds = [float(s.labels["le"]) for s in family.samples if s.name.endswith("_bucket")]
            wanted = listed["buckets"]
            if isinstance(wanted, str):  # up to the context length
                wanted = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0]
            assert bounds == [*wanted, float("inf")], name
    reasons = {s.labels["finished_reason"] for s in found["vllm:request_success"].samples}
    assert reasons == set(LISTED["finished_reasons"])
    sources = {s.labels["source"] for s in found["vllm:prompt_tokens_by_source"].samples}
    assert sources == set(LISTED["token_sources"])
    tiers = {s.labels["source"] for s in found["vllm:prompt_tokens_cached_by_source"].samples}
    assert tiers == set(LISTED["cache_tiers"])
    states = {s.labels["sleep_state"] for s in found["vllm:engine_sleep_state"].samples}
    assert states == set(LISTED["sleep_states"])


async def test_values_are_those_of_steps_and_timelines() -> None:
    found = await families(lived())
    assert value(found, "vllm:num_requests_running") == 3
    assert value(found, "vllm:kv_cache_usage_perc") == 0.25
    assert value(found, "vllm:generation_tokens", "_total") == 5
    assert value(found, "vllm:prompt_tokens", "_total") == value(found, "vllm:prefix_cache_queries", "_total") == 100
    assert value(found, "vllm:prompt_tokens_by_source", "_total", source="local_compute") == 84
    assert value(found, "vllm:prompt_tokens_cached_by_source", "_total", source="device") == 16
    assert value(found, "vllm:engine_sleep_state", sleep_state="awake") == 1
    assert value(found, "vllm:num_preemptions", "_total") == 2
    assert value(found, "vllm:request_success", "_total", finished_reason="length") == 1
    for name, seconds in {
        "time_to_first_token_seconds": 3.0, "e2e_request_latency_seconds": 13.0, "request_queue_time_seconds": 1.0,
        "request_prefill_time_seconds": 2.0, "request_decode_time_seconds": 10.0,
        "request_inference_time_seconds": 12.0,
        "request_time_per_output_token_seconds": 1.0, "inter_token_latency_seconds": 3 * 0.03 + 4.03,
        "iteration_tokens_total": 88.0,
    }.items():  # fmt: skip
        assert value(found, f"vllm:{name}", "_sum") == pytest.approx(seconds), name
    assert value(found, "vllm:inter_token_latency_seconds", "_bucket", le="0.05") == 3
    assert value(found, "vllm:inter_token_latency_seconds", "_count") == 4
    kinds = {s.labels["kind"]: s.value for s in found["trunkline_worker_batch_tokens"].samples}
    assert kinds == {"prefill": 84, "decode": 4, "padding": 3}
    assert value(found, "trunkline_worker_kv_blocks", state="cached") == 100
    assert value(found, "trunkline_worker_tenant_tokens", "_total", tenant="acme", kind="output") == 11
    assert value(found, "trunkline_worker_tenant_device_seconds", "_total", lane="standard") == 0.5
    assert value(found, "trunkline_worker_lane_refused", "_total", lane="batch") == 1
    assert value(found, "trunkline_worker_lane_waiting", lane="standard") == 2
    assert value(found, "trunkline_worker_grammar_compile_seconds", "_sum", outcome="compiled") == 0.75
    assert value(found, "trunkline_worker_grammar_compile_seconds", "_count", outcome="harmful") == 1
    assert value(found, "trunkline_worker_lost_grammar_processes", "_total") == 2


async def test_the_share_of_the_roofline_is_a_quotient_of_counters() -> None:
    metrics = WorkerMetrics(MODEL)
    metrics.take_step(EngineStep(record=StepRecord(done_s=NOW_S, device_s=0.2, least_bytes=7.0, least_flops=9.0)))
    found = await families(metrics)
    assert value(found, "trunkline_worker_step_least_bytes", "_total") == 7
    assert value(found, "trunkline_worker_step_least_flops", "_total") == 9
    assert found["trunkline_worker_step_least_seconds"].samples == [], "no peak rate is known"
    for _ in range(2):
        metrics.take_step(EngineStep(record=StepRecord(done_s=NOW_S, device_s=0.3, least_bytes=1.0, least_s=0.25)))
    found = await families(metrics)
    assert value(found, "trunkline_worker_step_least_bytes", "_total") == 9
    assert value(found, "trunkline_worker_step_least_seconds", "_total") == 0.5
    assert value(found, "trunkline_worker_step_device_seconds", "_sum") == pytest.approx(0.8)


async def test_imbalance_is_that_of_the_last_report_and_of_layers_with_experts() -> None:
    metrics = WorkerMetrics(MODEL)
    told: tuple[list[float], ...] = ([], [0.0, 9.0, 9.0, 9.0], [], [0.0, 1.5, 1.0, 2.25], [])
    for number, imbalance in enumerate(told):
        metrics.take_step(EngineStep(record=StepRecord(done_s=NOW_S + number, expert_imbalance=imbalance)))
    samples = (await families(metrics))["trunkline_worker_expert_imbalance"].samples
    assert [(s.labels["layer"], s.value) for s in samples] == [("1", 1.5), ("2", 1.0), ("3", 2.25)]


async def test_a_million_tokens_cost_what_the_rate_of_the_last_minute_says() -> None:
    metrics = WorkerMetrics(MODEL)
    for second in range(300):
        tokens = 1 if second < 200 else 10  # tokens per second; the price is a thousandth per second
        record = StepRecord(done_s=NOW_S + second, decode_tokens=tokens, sequences=tokens)
        metrics.take_step(EngineStep(token_handles=range(tokens), token_ids=[5] * tokens, record=record))
    found = {family.name: family for family in metrics.families(NOW_S + 299)}
    assert value(found, "trunkline_worker_output_tokens_per_second") == pytest.approx(10.0, rel=0.05)
    assert value(found, "trunkline_worker_cost_per_million_output_tokens") == pytest.approx(100.0, rel=0.05)


async def test_the_rate_after_an_idle_hour_is_that_of_the_last_minute() -> None:
    metrics = WorkerMetrics(MODEL)
    for second in (*range(100), *range(3700, 3760)):
        record = StepRecord(done_s=NOW_S + second, decode_tokens=10, sequences=10)
        metrics.take_step(EngineStep(token_handles=range(10), token_ids=[5] * 10, record=record))
    assert metrics.output_tokens_per_s(NOW_S + 3759) == pytest.approx(10.0, rel=0.2)
    assert metrics.output_tokens_per_s(NOW_S + 36_000) == pytest.approx(0.0, abs=0.05)


async def test_ten_thousand_tenants_are_few_series() -> None:
    metrics = lived()
    for n in range(10_000):
        metrics.choice_ended(ended(tenant=f"tenant-{n}", lane=LANES[n % 3]))
    for n in range(3):
        metrics.choice_ended(ended(tenant="tenant-5000", lane=LANES[n]))
    found = await families(metrics)
    for name, family in found.items():
        assert len(family.samples) <= 1000, name
    choices = found["trunkline_worker_tenant_choices"].samples
    assert sum(sample.value for sample in choices) == 10_004, "what is folded is counted"
    assert {"acme", "tenant-3", "other"} <= {sample.labels["tenant"] for sample in choices}
    assert not {"tenant-5000", "tenant-9999"} & {sample.labels["tenant"] for sample in choices}


async def test_memory_is_flat_over_many_choices() -> None:
    metrics = lived()

    def live(count: int) -> None:
        for n in range(count):
            record = StepRecord(done_s=NOW_S + n, decode_tokens=2, sequences=2, regular_tokens=2)
            metrics.take_step(EngineStep(token_handles=[1, 2], token_ids=[5, 5], record=record))
            metrics.first_token(Lane.STANDARD, n / 100, PromptReport(prompt_tokens=9))
            metrics.choice_ended(ended(tenant=f"tenant-{n}", outcome=("stop", "OVERLOADED", "cancelled")[n % 3]))

    live(2000)
    tracemalloc.start()
    live(10_000)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 50_000, "bytes; a reference kept per choice would be more than a megabyte"


async def test_the_answer_is_valid_openmetrics_too() -> None:
    content_type = content_type_of("application/openmetrics-text; version=1.0.0")
    body = await exposition(lived().families(NOW_S), content_type)
    assert content_type.startswith("application/openmetrics-text")
    assert b"\nvllm:generation_tokens_total{" in body, "colons stay"
    names = Counter(family.name for family in parse_openmetrics(body.decode()))  # type: ignore[no-untyped-call]
    assert names["vllm:generation_tokens"] == 1
    assert set(names.values()) == {1}, "a family is not repeated"
