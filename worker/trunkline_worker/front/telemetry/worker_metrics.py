"""All metrics of a worker: vLLM's, and those that vLLM does not have, which begin with trunkline_."""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

from prometheus_client.core import Metric

from trunkline.engine.v1.engine_pb2 import EngineStep
from trunkline.names import lane_name
from trunkline.v1.generation_pb2 import PromptReport
from trunkline.v1.worker_pb2 import GetModelResponse, LoadSample
from trunkline_runtime.telemetry.series import BoundedNames, BucketCounts, counter, gauge, histogram
from trunkline_worker.front.telemetry.timeline import ChoiceEnd
from trunkline_worker.front.telemetry.vllm_metrics import VllmMetrics
from trunkline_worker.step.lanes import LANES, lane_number

MAX_TENANTS = 100  # with three lanes and three kinds of tokens: 909 series
TENANT_LABELS = ("model_name", "tenant", "lane")
STEP_BUCKETS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0),
)  # fmt: skip
LANE_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)  # fmt: skip
COMPILE_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0)
RATE_S = 60.0  # the output rate is the mean of this time
MARK_S = 10.0  # between two marks of it
NUM_MARKS = 1 + int(RATE_S / MARK_S)
SECONDS_PER_HOUR, MILLION = 3600.0, 1_000_000
LABELS = ("model_name",)


class TenantMetrics:
    """What tenants used. The first MAX_TENANTS of them have series of their own."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._names = BoundedNames(MAX_TENANTS)
        self._outcomes: dict[tuple[str, ...], int] = defaultdict(int)  # by lane and outcome, of all tenants
        self._choices: dict[tuple[str, ...], int] = defaultdict(int)
        self._device_s: dict[tuple[str, ...], float] = defaultdict(float)
        self._tokens: dict[tuple[str, ...], int] = defaultdict(int)

    def choice_ended(self, end: ChoiceEnd) -> None:
        """Counts the end of a choice."""
        lane, timeline = end.lane.name.lower(), end.timeline
        key = (self._model_name, self._names.label(end.tenant), lane)
        self._outcomes[self._model_name, lane, end.outcome] += 1
        self._choices[key] += 1
        self._device_s[key] += timeline.device_s
        if timeline.HasField("first_token_s"):
            self._tokens[*key, "computed"] += end.prompt_tokens - timeline.cached_tokens
            self._tokens[*key, "cached"] += timeline.cached_tokens
            self._tokens[*key, "output"] += end.output_tokens - end.ledger_tokens

    def families(self) -> Iterable[Metric]:
        """All families."""
        yield counter(
            "trunkline_worker_choices",
            "Choices that ended, by outcome: a finish reason, cancelled, or the reason of an error.",
            ("model_name", "lane", "outcome"),
            self._outcomes.items(),
        )
        yield counter("trunkline_worker_tenant_choices", "Choices that ended.", TENANT_LABELS, self._choices.items())
        yield counter(
            "trunkline_worker_tenant_device_seconds",
            "Device time of ended choices: their shares of their steps, by tokens.",
            TENANT_LABELS,
            self._device_s.items(),
        )
        yield counter(
            "trunkline_worker_tenant_tokens",
            "Tokens of ended choices: of prompts, computed or cached, and of output.",
            (*TENANT_LABELS, "kind"),
            self._tokens.items(),
        )


class WorkerMetrics:
    """Filled by the front: with each step, each first token, each refusal and each end of a choice."""

    def __init__(self, model: GetModelResponse) -> None:
        self._model = model
        self._vllm = VllmMetrics(model)
        self._tenants = TenantMetrics(model.model)
        self._load = LoadSample(kv_free_blocks=model.kv_blocks)
        self._computed = {"prefill": 0, "decode": 0, "padding": 0}
        self._recomputed_tokens = self._forced_tokens = self._late_masks = 0
        self._host, self._device = BucketCounts(STEP_BUCKETS), BucketCounts(STEP_BUCKETS)
        self._compile: dict[str, BucketCounts] = defaultdict(lambda: BucketCounts(COMPILE_BUCKETS))  # by outcome
        self._lost_grammar_processes = 0
        self._least = {"bytes": 0.0, "flops": 0.0}  # that steps required
        self._least_s: float | None = None  # of steps at peak rates; None: none is known
        self._expert_imbalance: Sequence[float] = ()  # of each layer; 0: it has no experts
        self._queue = [BucketCounts(LANE_BUCKETS) for _ in LANES]
        self._first_token = [BucketCounts(LANE_BUCKETS) for _ in LANES]
        self._refused = [0 for _ in LANES]
        self._marks: deque[tuple[float, int]] = deque(maxlen=NUM_MARKS)  # ends of steps, and output tokens so far
        self._done_s = 0.0  # the end of the latest step

    def take_step(self, step: EngineStep) -> None:
        """Counts a step."""
        self._vllm.take_step(step)
        self._load = step.load
        for outcome, seconds in zip(step.compile_outcomes, step.compile_s, strict=True):
            self._compile[outcome].add(seconds)
        self._lost_grammar_processes += step.lost_grammar_processes
        if not step.HasField("record"):
            return
        record = step.record
        self._host.add(record.host_s)
        self._device.add(record.device_s)
        computed = self._computed
        computed["prefill"] += record.prefill_tokens
        computed["decode"] += record.decode_tokens
        computed["padding"] += record.padding_tokens
        self._forced_tokens += record.forced_tokens
        self._late_masks += record.late_masks
        self._least["bytes"] += record.least_bytes
        self._least["flops"] += record.least_flops
        if record.HasField("least_s"):
            self._least_s = (self._least_s or 0.0) + record.least_s
        if record.expert_imbalance:
            self._expert_imbalance = record.expert_imbalance[:]
        self._done_s = record.done_s
        if not self._marks or record.done_s - self._marks[-1][0] >= MARK_S:
            self._marks.append((record.done_s, self._vllm.generation_tokens))

    def first_token(self, lane: int, after_s: float, prompt: PromptReport) -> None:
        """Counts the first token of a choice, `after_s` after its submit."""
        self._vllm.first_token(after_s, prompt)
        self._first_token[lane].add(after_s)

    def refused(self, lane: int) -> None:
        """Counts a submit that a full queue refused."""
        self._refused[lane] += 1

    def choice_ended(self, end: ChoiceEnd) -> None:
        """Counts the end of a choice."""
        self._vllm.choice_ended(end)
        self._tenants.choice_ended(end)
        self._recomputed_tokens += end.timeline.recomputed_tokens
        if end.timeline.HasField("admitted_s"):
            self._queue[end.lane].add(end.timeline.admitted_s)

    def output_tokens_per_s(self, now_s: float) -> float:
        """Mean rate of the last minute, on the clock of the engine's steps."""
        if not self._marks:
            return 0.0
        now_s = max(now_s, self._done_s)
        recent = [mark for mark in self._marks if now_s - mark[0] <= RATE_S + MARK_S]
        since_s, tokens = recent[0] if recent else self._marks[-1]  # an idle worker has set none for a while
        return (self._vllm.generation_tokens - tokens) / (now_s - since_s) if now_s > since_s else 0.0

    def families(self, now_s: float) -> Iterable[Metric]:
        """All families, made one by one. now_s: on the clock of the engine's steps"""
        yield from self._vllm.families(self._load)
        yield from self._steps()
        yield from self._grammars()
        yield from self._lanes()
        yield from self._tenants.families()
        yield from self._cost(now_s)

    def _steps(self) -> Iterable[Metric]:
        model, load = self._model.model, self._load
        yield counter(
            "trunkline_worker_batch_tokens",
            "Positions computed in steps, by kind: the composition of the batches.",
            (*LABELS, "kind"),
            [((model, kind), count) for kind, count in self._computed.items()],
        )
        for name, documentation, value in (
            (
                "recomputed_tokens",
                "Tokens of ended choices that were computed again because of preemptions.",
                self._recomputed_tokens,
            ),
        ):
            yield counter(f"trunkline_worker_{name}", documentation, LABELS, [((model,), value)])
        blocks = (("live", load.kv_live_blocks), ("cached", load.kv_cached_blocks), ("free", load.kv_free_blocks))
        yield gauge(
            "trunkline_worker_kv_blocks",
            "KV blocks: in use, holding only reusable prefixes, and empty.",
            (*LABELS, "state"),
            [((model, state), count) for state, count in blocks],
        )
        for name, documentation, counts in (
            ("step_host_seconds", "Host time of a step that no device time overlaps.", self._host),
            ("step_device_seconds", "Time of a step on the device.", self._device),
        ):
            yield histogram(f"trunkline_worker_{name}", documentation, LABELS, [((model,), counts)])
        yield from self._roofline()
        yield gauge(
            "trunkline_worker_expert_imbalance",
            "Tokens of the layer's busiest expert over the mean of its experts, lately: 1 if all have equally many.",
            (*LABELS, "layer"),
            [((model, str(layer)), value) for layer, value in enumerate(self._expert_imbalance) if value],
        )
        for name, documentation, now in (
            ("waiting_tokens", "Tokens of waiting choices, cached or not.", load.waiting_tokens),
            ("uncached_tokens", "Prompt tokens that are still to be computed.", load.waiting_uncached_tokens),
            ("draining", "1 if the worker admits nothing new.", load.draining),
        ):
            yield gauge(f"trunkline_worker_{name}", documentation, LABELS, [((model,), float(now))])

    def _grammars(self) -> Iterable[Metric]:
        model = self._model.model
        for name, documentation, value in (
            ("forced_tokens", "Output tokens that grammars forced, so that they took no steps.", self._forced_tokens),
            ("late_masks", "Times that a choice sat out a step because its mask was late.", self._late_masks),
            (
                "lost_grammar_processes",
                "Processes for grammars that broke off, or took too long and were ended.",
                self._lost_grammar_processes,
            ),
        ):
            yield counter(f"trunkline_worker_{name}", documentation, LABELS, [((model,), value)])
        yield histogram(
            "trunkline_worker_grammar_compile_seconds",
            "Time to compile a grammar, by outcome: compiled, harmful, or the reason of another error.",
            (*LABELS, "outcome"),
            [((model, outcome), counts) for outcome, counts in self._compile.items()],
        )

    def _roofline(self) -> Iterable[Metric]:
        model, least_s = self._model.model, self._least_s
        yield counter(
            "trunkline_worker_step_least_bytes",
            "Least bytes that steps had to move: weights once a step, keys and values read and written.",
            LABELS,
            [((model,), self._least["bytes"])],
        )
        yield counter(
            "trunkline_worker_step_least_flops",
            "Floating-point operations that the tokens of steps require, without padding.",
            LABELS,
            [((model,), self._least["flops"])],
        )
        yield counter(
            "trunkline_worker_step_least_seconds",
            "Least time of steps: their bytes or operations, whichever take longer, at the device's peak rates.",
            LABELS,
            [] if least_s is None else [((model,), least_s)],
        )

    def _lanes(self) -> Iterable[Metric]:
        model, labels = self._model.model, (*LABELS, "lane")
        names = [(model, lane_name(lane_number(lane))) for lane in LANES]  # type: ignore[arg-type]
        waiting = [*self._load.waiting_by_lane, *(0 for _ in LANES)]
        yield gauge(
            "trunkline_worker_lane_waiting", "Waiting choices.", labels, zip(names, map(float, waiting), strict=False)
        )
        yield counter(
            "trunkline_worker_lane_refused",
            "Submits refused because the queue was full.",
            labels,
            zip(names, map(float, self._refused), strict=True),
        )
        for name, documentation, counts in (
            ("queue_seconds", "Time that choices waited for their first admission.", self._queue),
            ("first_token_seconds", "Time from the submit to the first token.", self._first_token),
        ):
            yield histogram(f"trunkline_worker_lane_{name}", documentation, labels, zip(names, counts, strict=True))

    def _cost(self, now_s: float) -> Iterable[Metric]:
        model, rate = self._model.model, self.output_tokens_per_s(now_s)
        price = self._model.price_per_hour
        yield gauge(
            "trunkline_worker_output_tokens_per_second",
            "Output tokens per second over the last minute.",
            LABELS,
            [((model,), rate)],
        )
        yield gauge(
            "trunkline_worker_price_per_hour", "What the worker costs.", LABELS, [((model,), price)] if price else []
        )
        yield gauge(
            "trunkline_worker_cost_per_million_output_tokens",
            "Price of a million output tokens at the rate of the last minute.",
            LABELS,
            [((model,), price / SECONDS_PER_HOUR / rate * MILLION)] if price and rate else [],
        )
