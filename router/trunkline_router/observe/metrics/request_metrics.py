"""Metrics of requests that have ended, and where their time to the first token went."""

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter

from prometheus_client.core import Metric

from trunkline_router.access.access import Tenants
from trunkline_router.observe.metrics.attempt_metrics import AttemptMetrics
from trunkline_router.observe.metrics.request_labels import MODEL, LabelRules, RequestLabels
from trunkline_router.record.request_record import (
    GENERATE,
    OK,
    PROVIDER,
    RequestRecord,
    operation_of,
)
from trunkline_runtime.telemetry import genai
from trunkline_runtime.telemetry.series import (
    SeriesBuckets,
    SeriesCounts,
    SeriesGroup,
    one_two_five,
)

ADMISSION, TOKENIZE, PLACE, FAILOVER = "admission", "tokenize", "place", "failover"
WORKER_QUEUE, PREFILL, WORKER, DELIVERY = "worker_queue", "prefill", "worker", "delivery"
TOKENS = "Tokens of requests that ended: of prompts, computed or cached, and of output."

LATENCY_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)  # fmt: skip
GAP_BUCKETS = (0.0, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)  # 0: no gap over the worker's target
MOST_TENANTS = 128  # labels: those of tenants with labels of their own, none, and the others
TENANT_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5)  # of first tokens; few: each is a series for every tenant
N_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)
TOKEN_BUCKETS = one_two_five(1_000_000)

MODEL_LANE, TENANT = ("model_name", "lane"), ("tenant",)
GENAI_LABELS = tuple(
    name.replace(".", "_")
    for name in (genai.OPERATION_NAME, genai.PROVIDER_NAME, genai.REQUEST_MODEL, genai.RESPONSE_MODEL)
)
VLLM_LABELS = ("model_name", "engine")
ENGINE = "0"  # as at workers


def tokens_of(record: RequestRecord) -> Sequence[tuple[str, int]]:
    """Tokens by kind, without kinds of which there are none. A prompt counts once a worker has computed it."""
    counts = [("output", record.completion_tokens)]
    if record.first_token_s is not None:
        cached = record.cached_tokens
        counts += [("prompt_computed", record.prompt_tokens - cached), ("prompt_cached", cached)]
    return [(kind, count) for kind, count in counts if count]


def tool_calls_of(record: RequestRecord) -> Sequence[tuple[str, int]]:
    """Tool calls by kind, without kinds of which there are none."""
    complete = record.complete_tool_calls
    counts = [("complete", complete), ("cut_off", record.tool_calls - complete)]
    return [(kind, count) for kind, count in counts if count]


class RequestMetrics(SeriesGroup):
    """The router's own metrics, of all requests."""

    def __init__(self) -> None:
        self._requests = SeriesCounts(
            "trunkline_router_requests",
            "Requests that ended, by outcome: a finish reason, several, granted, cancelled, SLOW_READER, or the reason "
            "of an error.",
            ("model_name", "lane", "endpoint", "outcome"),
        )
        self._first_token = SeriesBuckets(
            "trunkline_router_first_token_seconds",
            "Time from a request's arrival to its first output.",
            MODEL_LANE,
            LATENCY_BUCKETS,
        )
        self._whole = SeriesBuckets(
            "trunkline_router_request_seconds",
            "Time from the arrival of an answered request to its end.",
            MODEL_LANE,
            LATENCY_BUCKETS,
        )
        self._phases = SeriesBuckets(
            "trunkline_router_phase_seconds",
            "Where the time to the first output went, for phases that took time. Those of a request add up to it.",
            ("model_name", "phase"),
            LATENCY_BUCKETS,
            most=256,
        )
        self._gaps = SeriesBuckets(
            "trunkline_router_token_gap_seconds",
            "Longest gap between two output tokens of a choice, if it exceeds the worker's target; 0 otherwise.",
            MODEL,
            GAP_BUCKETS,
        )
        self._tokens = SeriesCounts("trunkline_router_tokens", TOKENS, ("model_name", "lane", "kind"))
        self._cache_misses = SeriesCounts(
            "trunkline_router_cache_misses",
            "Requests of whose prompts the worker's cache had less than nine tenths of what earlier prompts could have "
            "left there: new, changed, computing, other_worker, evicted or lost.",
            ("model_name", "reason"),
        )
        self._tool_calls = SeriesCounts(
            "trunkline_router_tool_calls",
            "Tool calls in answers that the router parsed: complete, or cut_off, for example by max_tokens.",
            ("model_name", "kind"),
        )
        self._stalled_s = SeriesCounts(
            "trunkline_router_stalled_seconds", "Time in which output waited for clients that did not read.", MODEL
        )

    def request_ended(self, record: RequestRecord, labels: RequestLabels, unix_s: float) -> None:
        """Counts a request that ended now."""
        model, lane = labels.model, labels.lane
        self._requests.add(model, lane, labels.endpoint, labels.outcome)
        trace_id = labels.trace_id
        ttft_s, duration_s = record.ttft_s, record.duration_s
        if ttft_s is not None:
            self._first_token.of(model, lane).add_traced(ttft_s, trace_id, unix_s)
            for phase, spent_s in phases_of(record):
                self._phases.of(model, phase).add(spent_s)
        if duration_s is not None and labels.result == OK:
            self._whole.of(model, lane).add_traced(duration_s, trace_id, unix_s)
        for kind, count in tokens_of(record):
            self._tokens.add(model, lane, kind, count=count)
        if record.cache_miss:
            self._cache_misses.add(model, record.cache_miss)
        for kind, count in tool_calls_of(record):
            self._tool_calls.add(model, kind, count=count)
        if record.stalled_s:
            self._stalled_s.add(model, count=record.stalled_s)
        for attempt in record.attempts:
            for timeline in attempt.timelines:
                self._gaps.of(model).add_traced(timeline.longest_gap_s, trace_id, unix_s)


class TenantTotals(SeriesGroup):
    """What tenants had of the fleet, and what it cost. Their number is bounded, see LabelRules."""

    def __init__(self) -> None:
        self._requests = SeriesCounts(
            "trunkline_router_tenant_requests",
            "Requests that ended, by result: ok, refused, cancelled or failed.",
            ("tenant", "lane", "result"),
        )
        self._tokens = SeriesCounts("trunkline_router_tenant_tokens", TOKENS, ("tenant", "lane", "kind"))
        self._first_token = SeriesBuckets(
            "trunkline_router_tenant_first_token_seconds",
            "Time from a request's arrival to its first output.",
            TENANT,
            TENANT_BUCKETS,
            most=MOST_TENANTS,
        )
        self._device_s = SeriesCounts(
            "trunkline_router_tenant_device_seconds", "Device time of requests: their shares of steps.", TENANT
        )
        self._cost = SeriesCounts(
            "trunkline_router_tenant_cost", "Price of that device time, at workers with a price.", TENANT
        )
        self._cost_of_model = SeriesCounts(
            "trunkline_router_cost", "Price of the device time of requests, at workers with a price.", MODEL
        )

    def request_ended(self, record: RequestRecord, labels: RequestLabels, unix_s: float) -> None:
        """Counts a request that ended now."""
        tenant, lane = labels.tenant, labels.lane
        self._requests.add(tenant, lane, labels.result)
        for kind, count in tokens_of(record):
            self._tokens.add(tenant, lane, kind, count=count)
        if record.ttft_s is not None:
            self._first_token.of(tenant).add(record.ttft_s)
        device_s = sum([attempt.device_s for attempt in record.attempts])
        if device_s:
            self._device_s.add(tenant, count=device_s)
        cost = record.cost
        if cost:
            self._cost.add(tenant, count=cost)
            self._cost_of_model.add(labels.model, count=cost)


def _genai(name: str, documentation: str, bounds: Sequence[float], *labels: str) -> SeriesBuckets:
    return SeriesBuckets(f"{name.replace('.', '_')}_seconds", documentation, (*GENAI_LABELS, *labels), bounds)


class GenAiMetrics(SeriesGroup):
    """Metrics of OpenTelemetry's conventions for generative AI, and those of vLLM's that count requests rather than
    choices: workers count choices. Of the direct path only the worker sees the answer."""

    def __init__(self) -> None:
        self._duration = _genai(
            genai.SERVER_REQUEST_DURATION, "Duration of a request.", genai.DURATION_BUCKETS, "error_type"
        )
        self._first_token = _genai(
            genai.SERVER_TIME_TO_FIRST_TOKEN,
            "Time to the first output, of answered requests.",
            genai.FIRST_TOKEN_BUCKETS,
        )
        self._per_token = _genai(
            genai.SERVER_TIME_PER_OUTPUT_TOKEN,
            "Mean time per token of a choice after the first output.",
            genai.PER_TOKEN_BUCKETS,
        )
        self._n = SeriesBuckets("vllm:request_params_n", "Choices that a request asks for.", VLLM_LABELS, N_BUCKETS)
        self._max_tokens = SeriesBuckets(
            "vllm:request_params_max_tokens", "max_tokens of requests that have it.", VLLM_LABELS, TOKEN_BUCKETS
        )
        self._longest = SeriesBuckets(
            "vllm:request_max_num_generation_tokens",
            "Output tokens of a request's longest choice.",
            VLLM_LABELS,
            TOKEN_BUCKETS,
        )

    def request_ended(self, record: RequestRecord, labels: RequestLabels, unix_s: float) -> None:
        """Counts a request that ended now."""
        duration_s, ttft_s = record.duration_s, record.ttft_s
        if record.method != GENERATE or duration_s is None:
            return
        model, trace_id, is_ok = labels.model, labels.trace_id, labels.result == OK
        common = (operation_of(record), PROVIDER, model, model)
        self._duration.of(*common, "" if is_ok else labels.outcome).add_traced(duration_s, trace_id, unix_s)
        if not record.choices:
            return
        self._n.of(model, ENGINE).add(record.choices)
        if record.max_tokens is not None:
            self._max_tokens.of(model, ENGINE).add(record.max_tokens)
        if ttft_s is None or not is_ok:
            return
        if record.inputs:
            return
        self._first_token.of(*common).add_traced(ttft_s, trace_id, unix_s)
        per_choice = record.completion_tokens / record.choices
        if per_choice > 1:
            self._per_token.of(*common).add_traced((duration_s - ttft_s) / (per_choice - 1), trace_id, unix_s)
        self._longest.of(model, ENGINE).add(record.longest_choice_tokens)


class RequestCounts:
    """Everything that is counted of requests when they end.  unix_s: the time, for examples"""

    def __init__(self, tenants: Tenants, unix_s: Callable[[], float] = time.time) -> None:
        self.rules = LabelRules(tenants)
        self._unix_s = unix_s
        self._parts = (RequestMetrics(), AttemptMetrics(), TenantTotals(), GenAiMetrics())

    def request_ended(self, record: RequestRecord) -> None:
        """Counts a request."""
        labels, unix_s = self.rules.of(record), self._unix_s()
        for part in self._parts:
            part.request_ended(record, labels, unix_s)

    def families(self) -> Iterable[Metric]:
        """All families."""
        return chain.from_iterable(part.families() for part in self._parts)


def phases_of(record: RequestRecord) -> list[tuple[str, float]]:
    """Phases that took time, in order, with their seconds, which add up to the time to the first token; empty if there
    was no token.

    FAILOVER: attempts that had no output. WORKER: at a worker that did not tell how it divides into WORKER_QUEUE and
    PREFILL. DELIVERY: the rest: network, event loops, and decoding the first token into text.
    """
    left_s = record.ttft_s
    if left_s is None:
        return []
    parts = []
    if record.admitted is not None:
        parts.append((ADMISSION, record.admitted.duration_s))
    if record.tokenized is not None:
        parts.append((TOKENIZE, record.tokenized.duration_s))
    lost = []
    for attempt in record.attempts:
        if attempt.first_output_s is not None:
            break
        if attempt.ended_s is not None:
            lost.append((FAILOVER, attempt.ended_s - attempt.started_s))
    else:
        return []
    begun_s = attempt.started_s
    parts.append((PLACE, sum([made.time.duration_s for made in record.placements if made.time.start_s <= begun_s])))
    parts += lost
    begun = [timeline for timeline in attempt.timelines if timeline.HasField("first_token_s")]
    if begun:
        timeline = min(begun, key=attrgetter("first_token_s")) if len(begun) > 1 else begun[0]  # with the first token
        parts.append((WORKER_QUEUE, timeline.admitted_s))
        parts.append((PREFILL, timeline.first_token_s - timeline.admitted_s))
    else:
        parts.append((WORKER, attempt.first_output_s - begun_s))
    phases = []
    for phase, part_s in parts:
        # Clocks and workers may disagree by microseconds: no phase gets more than what is left.
        part_s = min(part_s, left_s)
        if part_s > 0.0:
            phases.append((phase, part_s))
            left_s -= part_s
    phases.append((DELIVERY, left_s))
    return phases
