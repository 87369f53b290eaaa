"""Metrics of OpenTelemetry's conventions for generative AI, and those of vLLM's that count requests rather than
choices: workers count choices."""

from collections.abc import Callable, Iterable

from prometheus_client.core import Metric

from trunkline_router.observe.metrics.request_labels import RequestLabels
from trunkline_router.record.request_record import GENERATE, OK, PROVIDER, RequestRecord, operation_of
from trunkline_runtime.telemetry import genai
from trunkline_runtime.telemetry.bucket_counts import one_two_five
from trunkline_runtime.telemetry.exposition import histogram
from trunkline_runtime.telemetry.series_counts import SeriesBuckets

LABELS = tuple(
    name.replace(".", "_")
    for name in (genai.OPERATION_NAME, genai.PROVIDER_NAME, genai.REQUEST_MODEL, genai.RESPONSE_MODEL)
)
VLLM_LABELS = ("model_name", "engine")
ENGINE = "0"  # as at workers
N_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)
TOKEN_BUCKETS = one_two_five(1_000_000)


class GenAiMetrics:
    """Counted at the ends of requests; of the direct path only the worker sees the answer.

    unix_s: the time, for examples
    """

    def __init__(self, unix_s: Callable[[], float]) -> None:
        self._unix_s = unix_s
        self._duration = SeriesBuckets(len(LABELS) + 1, genai.DURATION_BUCKETS)
        self._first_token = SeriesBuckets(len(LABELS), genai.FIRST_TOKEN_BUCKETS)
        self._per_token = SeriesBuckets(len(LABELS), genai.PER_TOKEN_BUCKETS)
        self._n = SeriesBuckets(len(VLLM_LABELS), N_BUCKETS)
        self._max_tokens = SeriesBuckets(len(VLLM_LABELS), TOKEN_BUCKETS)
        self._longest = SeriesBuckets(len(VLLM_LABELS), TOKEN_BUCKETS)

    def request_ended(self, record: RequestRecord, labels: RequestLabels) -> None:
        """Counts a request."""
        duration_s, ttft_s = record.duration_s, record.ttft_s
        if record.method != GENERATE or duration_s is None:
            return
        trace_id, unix_s = labels.trace_id, self._unix_s()
        operation = operation_of(record.endpoint)
        common = (operation, PROVIDER, labels.model, labels.model)
        error = "" if labels.result == OK else labels.outcome
        self._duration.of((*common, error)).add_traced(duration_s, trace_id, unix_s)
        if not record.choices:
            return
        vllm = (labels.model, ENGINE)
        self._n.of(vllm).add(record.choices)
        if record.max_tokens is not None:
            self._max_tokens.of(vllm).add(record.max_tokens)
        if ttft_s is None or labels.result != OK:
            return
        self._first_token.of(common).add_traced(ttft_s, trace_id, unix_s)
        per_choice = record.completion_tokens / record.choices
        if per_choice > 1:
            self._per_token.of(common).add_traced((duration_s - ttft_s) / (per_choice - 1), trace_id, unix_s)
        self._longest.of(vllm).add(record.longest_choice_tokens)

    def families(self) -> Iterable[Metric]:
        """All families."""
        error_type = ("error_type",)
        for name, documentation, labels, counts in (
            (genai.SERVER_REQUEST_DURATION, "Duration of a request.", LABELS + error_type, self._duration),
            (genai.SERVER_TIME_TO_FIRST_TOKEN, "Time to the first output, of answered requests.", LABELS,
             self._first_token),
            (genai.SERVER_TIME_PER_OUTPUT_TOKEN, "Mean time per token of a choice after the first output.", LABELS,
             self._per_token),
        ):  # fmt: skip
            yield histogram(f"{name.replace('.', '_')}_seconds", documentation, labels, counts.items())
        for name, documentation, counts in (
            ("request_params_n", "Choices that a request asks for.", self._n),
            ("request_params_max_tokens", "max_tokens of requests that have it.", self._max_tokens),
            ("request_max_num_generation_tokens", "Output tokens of a request's longest choice.", self._longest),
        ):
            yield histogram(f"vllm:{name}", documentation, VLLM_LABELS, counts.items())
