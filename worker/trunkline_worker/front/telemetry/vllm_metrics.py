"""The metrics that vLLM has too, with its names, labels and buckets, so that dashboards and autoscalers made for vLLM
work unchanged. tests/worker/telemetry/vllm_metrics.json has the list, and where it comes from."""

from collections.abc import Iterable

from prometheus_client.core import Metric

from trunkline.engine.v1.engine_pb2 import EngineStep
from trunkline.v1.generation_pb2 import PromptReport
from trunkline.v1.worker_pb2 import GetModelResponse, LoadSample
from trunkline_runtime.telemetry.series import BucketCounts, counter, gauge, histogram, one_two_five
from trunkline_worker.front.telemetry.timeline import ChoiceEnd

LABELS = ("model_name", "engine")
ENGINE = "0"  # a worker has one
FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
PER_TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)  # fmt: skip
REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
ITERATION_BUCKETS = (*(float(1 << power) for power in (0, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14)),)
PREEMPTION_BUCKETS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
TIERS = ("device", "host", "disk", "p2p", "external_unspecified")  # all cached tokens are in the device's memory
SLEEP_STATES = {"awake": 1.0, "weights_offloaded": 0.0, "discard_all": 0.0}  # a worker never sleeps
FINISHED_REASONS = ("stop", "length", "abort", "error", "repetition")
TIMES = {
    "e2e_request_latency_seconds": "Time from the submit to the end of the choice.",
    "request_queue_time_seconds": "Time that the choice waited for admission.",
    "request_inference_time_seconds": "Time from admission to the end of the choice.",
    "request_prefill_time_seconds": "Time from admission to the first token.",
    "request_decode_time_seconds": "Time from the first token to the end of the choice.",
}
TOKENS = {
    "request_prompt_tokens": "Tokens of the choice's prompt.",
    "request_generation_tokens": "Output tokens of the choice.",
    "request_prefill_kv_computed_tokens": "Prompt tokens that were not found in the cache.",
}


class VllmMetrics:
    """Counted by choice where vLLM counts by request: each of a request's n outputs is a submit of its own here."""

    def __init__(self, model: GetModelResponse) -> None:
        self._model = model
        tokens = one_two_five(model.context_length)
        self._first_token = BucketCounts(FIRST_TOKEN_BUCKETS)
        self._inter_token = BucketCounts(PER_TOKEN_BUCKETS)
        self._per_token = BucketCounts(PER_TOKEN_BUCKETS)
        self._iteration = BucketCounts(ITERATION_BUCKETS)
        self._preempted = BucketCounts(PREEMPTION_BUCKETS)
        self._times = {name: BucketCounts(REQUEST_BUCKETS) for name in TIMES}
        self._tokens = {name: BucketCounts(tokens) for name in TOKENS}
        self._finished = dict.fromkeys(FINISHED_REASONS, 0)
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._preemptions = 0
        self.generation_tokens = 0
        self._done_s = 0.0  # the end of the latest step

    def take_step(self, step: EngineStep) -> None:
        """Counts a step."""
        self._preemptions += len(step.preempted_handles)
        self.generation_tokens += len(step.token_handles) + sum([len(output.token_ids) for output in step.outputs])
        if not step.HasField("record"):
            return
        record = step.record
        self._iteration.add(record.prefill_tokens + record.decode_tokens)
        if record.regular_tokens:
            self._inter_token.add(record.done_s - self._done_s, record.regular_tokens)
        for since_s in record.late_since_s:
            self._inter_token.add(record.done_s - since_s)
        self._done_s = record.done_s

    def first_token(self, after_s: float, prompt: PromptReport) -> None:
        """Counts the first token of a choice, `after_s` after its submit."""
        self._first_token.add(after_s)
        self._prompt_tokens += prompt.prompt_tokens
        self._cached_tokens += prompt.cached_tokens

    def choice_ended(self, end: ChoiceEnd) -> None:
        """Counts the end of a choice. Only choices that finished have their times and tokens counted."""
        if end.outcome not in ("stop", "length"):
            self._finished["error" if end.is_error else "abort"] += 1
            return
        self._finished[end.outcome] += 1
        timeline = end.timeline
        num_tokens = end.output_tokens - end.ledger_tokens
        decode_s = timeline.ended_s - timeline.first_token_s
        times = self._times
        times["e2e_request_latency_seconds"].add(timeline.ended_s)
        times["request_queue_time_seconds"].add(timeline.admitted_s)
        times["request_inference_time_seconds"].add(timeline.ended_s - timeline.admitted_s)
        times["request_prefill_time_seconds"].add(timeline.first_token_s - timeline.admitted_s)
        times["request_decode_time_seconds"].add(decode_s)
        self._per_token.add(decode_s / (num_tokens - 1) if num_tokens > 1 else 0.0)
        self._preempted.add(timeline.preemptions)
        self._tokens["request_prompt_tokens"].add(end.prompt_tokens)
        self._tokens["request_generation_tokens"].add(num_tokens)
        self._tokens["request_prefill_kv_computed_tokens"].add(end.prompt_tokens - timeline.cached_tokens)

    def families(self, load: LoadSample) -> Iterable[Metric]:
        """All families, with the engine's latest load."""
        yield from self._gauges(load)
        yield from self._counters()
        yield from self._histograms()

    @property
    def _values(self) -> tuple[str, str]:
        return (self._model.model, ENGINE)

    def _gauges(self, load: LoadSample) -> Iterable[Metric]:
        values = self._values
        usage = load.kv_live_blocks / self._model.kv_blocks if self._model.kv_blocks else 0.0
        for name, documentation, value in (
            ("num_requests_running", "Choices in the running set.", load.running),
            ("num_requests_waiting", "Choices that wait for admission.", load.waiting),
            ("kv_cache_usage_perc", "Share of KV blocks in use by running choices; 1 is all.", usage),
        ):
            yield gauge(f"vllm:{name}", documentation, LABELS, [(values, value)])
        reasons = [((*values, "capacity"), float(load.waiting)), ((*values, "deferred"), 0.0)]
        yield gauge(
            "vllm:num_requests_waiting_by_reason", "Choices that wait for admission.", (*LABELS, "reason"), reasons
        )
        states = [((*values, state), value) for state, value in SLEEP_STATES.items()]
        yield gauge("vllm:engine_sleep_state", "1 for the state of the engine.", (*LABELS, "sleep_state"), states)
        info = (str(self._model.block_size), str(self._model.kv_blocks), ENGINE)
        labels = ("block_size", "num_gpu_blocks", "engine")
        yield gauge("vllm:cache_config_info", "Size of the KV pool, as labels.", labels, [(info, 1.0)])

    def _counters(self) -> Iterable[Metric]:
        values, computed = self._values, self._prompt_tokens - self._cached_tokens
        for name, documentation, value in (
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", self._prompt_tokens),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", self._cached_tokens),
            ("num_preemptions", "Preemptions.", self._preemptions),
            ("prompt_tokens", "Prompt tokens, cached or computed.", self._prompt_tokens),
            ("prompt_tokens_cached", "Prompt tokens found in the prefix cache.", self._cached_tokens),
            ("generation_tokens", "Output tokens.", self.generation_tokens),
        ):
            yield counter(f"vllm:{name}", documentation, LABELS, [(values, value)])
        sources = zip(SOURCES, (computed, self._cached_tokens, 0), strict=True)
        yield counter(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens, by where their KV came from.",
            (*LABELS, "source"),
            [((*values, source), count) for source, count in sources],
        )
        tiers = zip(TIERS, (self._cached_tokens, *(0 for _ in TIERS[1:])), strict=True)
        yield counter(
            "vllm:prompt_tokens_cached_by_source",
            "Prompt tokens found in the prefix cache, by the tier that held them.",
            (*LABELS, "source"),
            [((*values, tier), count) for tier, count in tiers],
        )
        yield counter(
            "vllm:request_success",
            "Choices that ended, by reason.",
            (*LABELS, "finished_reason"),
            [((*values, reason), count) for reason, count in self._finished.items()],
        )

    def _histograms(self) -> Iterable[Metric]:
        for name, documentation, counts in (
            ("time_to_first_token_seconds", "Time from the submit to the first token.", self._first_token),
            ("inter_token_latency_seconds", "Time between two output tokens.", self._inter_token),
            ("request_time_per_output_token_seconds", "Mean time per token after the first.", self._per_token),
            ("iteration_tokens_total", "Tokens computed in a step.", self._iteration),
            ("request_num_preemptions", "Preemptions of the choice.", self._preempted),
            *((name, documentation, self._times[name]) for name, documentation in TIMES.items()),
            *((name, documentation, self._tokens[name]) for name, documentation in TOKENS.items()),
        ):
            yield histogram(f"vllm:{name}", documentation, LABELS, [(self._values, counts)])
