"""What became of one request in this router, and when.

The stages of the path that all protocols share fill the record in while the request runs: a few attributes per request,
none per token. Listeners read it once, when the request has ended. It never holds content: no prompt, output or
credential. Times that end in `_s` are on the router's monotonic clock.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trunkline.status import OVERLOADED, QUARANTINED
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.worker_pb2 import OutputKind, Timeline
from trunkline_router.record.error_statuses import TABLE
from trunkline_router.routing.policy import Candidate, RoutePlan

GENERATE, GRANT = "generate", "grant"  # RequestRecord.method
GRPC, HTTP = "grpc", "http"  # RequestRecord.protocol
GRANTED = "granted"  # RequestRecord.outcome: the worker's log has that of the answer
UNKNOWN = "UNKNOWN"
CANCELLED = "cancelled"  # RequestRecord.outcome, and AttemptRecord.ended
COMPLETE = "complete"  # AttemptRecord.ended

# RequestRecord.stage: what a request has come to, and RequestRecord.refused_by
ARRIVAL, CHECKS, MODEL, TOKENIZER = "arrival", "checks", "model", "tokenizer"
QUOTAS, PLACEMENT, WORKER = "quotas", "placement", "worker"
SLOW_CLIENT = "client"  # RequestRecord.refused_by alone

MOST_CANDIDATES = 8  # that are told of a placement: the chosen worker and the next best
MOST_NOTED = 16  # placements and attempts that a record keeps; a request that has more of them keeps the latest
MOST_TIMELINES = 16  # of an attempt that are kept once the listeners were told


class Interval(NamedTuple):
    """A part of a request's time."""

    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


class PlacementRecord:
    """One decision for a worker. `time` includes the wait until there was a worker to choose.

    plan: the decision, which holds nothing of the prompt, but a table of the fleet; None if no worker came, and once
        the listeners were told, see keep_candidates()
    worker, policy, reason: as in the plan, "" without one
    predicted_ttft_s: from the decision to the first token; None if the policy predicts nothing
    waits_for_kv: whether most of the predicted wait there was for KV blocks
    """

    __slots__ = ("_candidates", "matched_tokens", "num_workers", "plan", "policy", "predicted_ttft_s", "reason", "time",
                 "waits_for_kv", "worker")  # fmt: skip

    def __init__(self, time: Interval, plan: RoutePlan | None, predicted_ttft_s: float | None = None) -> None:
        self.time = time
        self.plan = plan
        self._candidates: Sequence[Candidate] = ()
        self.worker = self.policy = self.reason = ""
        self.matched_tokens = self.num_workers = 0
        self.predicted_ttft_s = predicted_ttft_s
        self.waits_for_kv = False
        if plan is None:
            return
        self.worker, self.policy, self.reason = plan.worker_id, plan.policy, plan.reason
        self.matched_tokens, self.num_workers = plan.matched_tokens, len(plan.workers.worker_ids)
        if plan.prediction is not None:
            self.waits_for_kv = plan.prediction.waits_for_kv(plan.chosen)

    @property
    def candidates(self) -> Sequence[Candidate]:
        """The chosen worker, then the next best. None, once the plan was dropped, unless they were kept."""
        return self._candidates or (() if self.plan is None else self.plan.best(MOST_CANDIDATES))

    def keep_candidates(self) -> None:
        """Keeps them for readers that come after the listeners were told."""
        self._candidates = self.candidates


@dataclass(slots=True)
class AttemptRecord:
    """One worker that the request was sent to; or, of the direct path, a grant for it.

    resumed_at_tokens: output tokens of earlier attempts, after which this one continued; None: it began anew
    price_per_hour: of the worker; 0.0 if it has none
    first_output_s, last_output_s: when output was first and last handed on to the client's side; None: there was none
    ended: COMPLETE, CANCELLED, or a reason of the error table; of a grant GRANTED
    problem: why the worker was lost, in one line without content; "" if it was not
    clock_skew_s: the worker's clock minus the router's; None: not known
    timelines: what the worker says of the choices that ended there. Checked: times are in order and within the attempt,
        and `received` is on this router's clock. Those beyond MOST_TIMELINES go once the listeners were told
    device_s: of all choices that ended there
    """

    worker: str
    started_s: float
    span_id: int = 0
    resumed_at_tokens: int | None = None
    price_per_hour: float = 0.0
    first_output_s: float | None = None
    last_output_s: float | None = None
    ended_s: float | None = None
    ended: str = CANCELLED
    problem: str = ""
    clock_skew_s: float | None = None
    timelines: list[Timeline] = field(default_factory=list)
    device_s: float = 0.0

    def note_timeline(self, timeline: Timeline, *, keeps_few: bool = False) -> None:
        """keeps_few: only MOST_TIMELINES are kept: there may be thousands"""
        if not keeps_few or len(self.timelines) < MOST_TIMELINES:
            self.timelines.append(timeline)
        self.device_s += timeline.device_s

    @property
    def is_lost(self) -> bool:
        """Whether the worker was lost or refused the request."""
        return bool(self.problem)


@dataclass(slots=True)
class RequestRecord:
    """A request's record. Fields that are not known yet, or never become known, have their defaults.

    method: GENERATE or GRANT
    is_streamed: whether the client reads the answer while it is computed; False: it gets the whole answer
    protocol: GRPC or HTTP
    endpoint: the HTTP path, for example "/v1/chat/completions", or the RPC's full name without a leading slash
    url_scheme: "http" or "https", as the router serves it; "" over gRPC
    trace_id: 128 bits; the request's in all processes
    span_id, parent_span_id: 64 bits; of the router's own span, and of the caller's. 0: the caller has none
    is_sampled: whether the trace was chosen when the request began, so that all processes export their spans of it
    has_export_place: whether a sampled request got a place among those that may be exported; None: it did not ask
    is_exported: whether this router exports its spans of the trace, which may be decided at the end
    sampling: the parameters with all defaults filled in; None once the listeners were told
    is_seeded: whether the client gave the seed
    inputs: of a request for vectors or scores; 0: it generates
    output: what it asks workers for; unspecified: tokens, or it was refused before that was known
    completion_tokens: of all choices together
    longest_choice_tokens: output tokens of the longest choice
    tool_calls, complete_tool_calls: that the answer has, if it is parsed here
    reasoning_tokens: of all choices together; 0 if they were not counted
    max_tokens: of a choice; None: the client sets none
    grammar: the kind of what constrains the answer, "" if nothing does
    prompt_tokens, cached_tokens: of the prompt, which all choices share, or of all inputs
    has_answers: whether the prompt is a conversation with messages of the assistant
    cache_miss: why so little of the prompt was cached, a CacheMiss; "" if enough was
    seen_tokens: with a cache_miss, leading tokens of the prompt that earlier ones had, too
    outcome: the choices' finish reasons, without repetition, joined by commas; else CANCELLED, or a reason of the error
        table in capitals, UNKNOWN for one that a worker of a newer version has; of a grant GRANTED
    code: of the gRPC status; 0: OK
    stage: what it has come to; of a request that has ended, the last one
    refused_field: the field that the refusal blames, as the API names it; "" if none
    searched: the search for its model, which takes time only if no worker of it is ready
    stalled_s: time in which output waited for a client that did not read
    awaited: choices that were aborted, of which their workers will still say what became of them
    when_known: called once none is awaited
    fell_behind: whether it ended, with OVERLOADED, because the client read too slowly
    """

    request_id: str
    started_s: float = field(default_factory=time.monotonic)
    started_unix_ns: int = field(default_factory=time.time_ns)
    method: str = GENERATE
    protocol: str = GRPC
    endpoint: str = ""
    url_scheme: str = ""
    is_streamed: bool = True
    trace_id: int = 0
    span_id: int = 0
    parent_span_id: int = 0
    tracestate: str = ""
    is_sampled: bool = False
    has_export_place: bool | None = None
    is_exported: bool = False
    tenant: str = ""
    lane: str = ""
    model: str = ""
    sampling: SamplingParams | None = None
    is_seeded: bool = False
    prompt_tokens: int = 0
    choices: int = 0
    inputs: int = 0
    output: "OutputKind.ValueType" = OutputKind.OUTPUT_KIND_UNSPECIFIED
    max_tokens: int | None = None
    grammar: str = ""
    cached_tokens: int = 0
    has_answers: bool = False
    cache_miss: str = ""
    seen_tokens: int = 0
    completion_tokens: int = 0
    longest_choice_tokens: int = 0
    tool_calls: int = 0
    complete_tool_calls: int = 0
    reasoning_tokens: int = 0
    searched: Interval | None = None
    tokenized: Interval | None = None
    admitted: Interval | None = None  # by the tenant's quotas
    placements: list[PlacementRecord] = field(default_factory=list)
    attempts: list[AttemptRecord] = field(default_factory=list)
    grants: int = 0
    first_token_s: float | None = None  # when output was first handed on to the client's side
    ended_s: float | None = None
    outcome: str = CANCELLED
    code: int = 0
    stage: str = ARRIVAL
    refused_field: str = ""
    stalled_s: float = 0.0
    awaited: int = 0
    when_known: "Callable[[RequestRecord], None] | None" = None
    fell_behind: bool = False

    def note_placement(self, placement: PlacementRecord) -> None:
        self.placements.append(placement)
        del self.placements[:-MOST_NOTED]

    def note_attempt(self, attempt: AttemptRecord) -> None:
        self.attempts.append(attempt)
        del self.attempts[:-MOST_NOTED]

    def placement_of(self, attempt: AttemptRecord) -> PlacementRecord | None:
        """The decision that led to an attempt: the latest one for its worker that was made before it."""
        for placement in reversed(self.placements):
            if placement.worker == attempt.worker and placement.time.end_s <= attempt.started_s:
                return placement
        return None

    def answered_s(self, attempt: AttemptRecord) -> float | None:
        """When the attempt had the output that its decision predicted: the first one; of several inputs the last one.
        None: it never had it, or only those inputs that another attempt had left."""
        if not self.inputs:
            return attempt.first_output_s
        is_whole = attempt.ended == COMPLETE and attempt.resumed_at_tokens is None
        return attempt.last_output_s if is_whole else None

    def heard(self) -> None:
        """One choice less is awaited."""
        self.awaited -= 1
        if not self.awaited and self.when_known is not None:
            self.when_known(self)

    def log_fields(self) -> dict[str, Any]:
        """What every line of the log about the request says."""
        fields: dict[str, Any] = {"request_id": self.request_id}
        if self.trace_id:
            fields["trace_id"] = f"{self.trace_id:032x}"
        if self.tenant:
            fields["tenant"] = self.tenant
        if self.attempts:
            fields["worker"] = self.worker
        return fields

    @property
    def is_failed(self) -> bool:
        """Whether the outcome is a reason of the error table."""
        return self.outcome.isupper()

    @property
    def has_answer(self) -> bool:
        """Whether the outcome is the answer's finish reasons."""
        return result_of(self.outcome) == OK and self.outcome != GRANTED

    @property
    def refused_by(self) -> str:
        """The stage that refused the request, or in which it failed; "" unless it is failed."""
        if not self.is_failed:
            return ""
        return SLOW_CLIENT if self.fell_behind else self.stage

    def unix_ns(self, time_s: float) -> int:
        """A time on the monotonic clock as nanoseconds since 1970."""
        return self.started_unix_ns + int((time_s - self.started_s) * 1e9)

    @property
    def last_timeline(self) -> Timeline | None:
        """Of the first choice in the last attempt of which the worker has said anything."""
        return next((attempt.timelines[0] for attempt in reversed(self.attempts) if attempt.timelines), None)

    @property
    def worker(self) -> str:
        """The last worker that the request was sent to, "" if there was none."""
        return self.attempts[-1].worker if self.attempts else ""

    @property
    def duration_s(self) -> float | None:
        return None if self.ended_s is None else self.ended_s - self.started_s

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.started_s

    @property
    def resumptions(self) -> int:
        """How often the answer was continued on another worker."""
        return sum(attempt.resumed_at_tokens is not None for attempt in self.attempts)

    @property
    def silences(self) -> dict[int, Interval]:
        """The pauses of the answer while it moved to another worker, by the place of the lost attempt: from its last
        output, or that of an earlier attempt, to the first output of a later one."""
        silences: dict[int, Interval] = {}
        last_s: float | None = None
        lost = 0
        for place, attempt in enumerate(self.attempts):
            if attempt.first_output_s is None:
                continue
            if last_s is not None:
                silences[lost] = Interval(last_s, attempt.first_output_s)
            last_s, lost = attempt.last_output_s, place
        return silences

    @property
    def cost(self) -> float | None:
        """The price of the device time that its workers report, in the currency of --price-per-hour; None if no worker
        with a price reports any."""
        priced = [attempt for attempt in self.attempts if attempt.price_per_hour and attempt.timelines]
        if not priced:
            return None
        return sum([attempt.price_per_hour / 3600.0 * attempt.device_s for attempt in priced])


OK, REFUSED, FAILED = "ok", "refused", "failed"  # results; and CANCELLED
REASONS = frozenset(TABLE)


def result_of(outcome: str) -> str:
    """The kind of an outcome: OK, REFUSED, FAILED, also for unknown errors, or CANCELLED."""
    if outcome.isupper():
        row = TABLE.get(outcome)
        return REFUSED if row is not None and row.status < 500 else FAILED
    return CANCELLED if outcome == CANCELLED else OK


def is_worth_a_look(record: RequestRecord) -> bool:
    """Whether the request may have failed through no fault of its client."""
    is_servers = record.outcome in (OVERLOADED, QUARANTINED) or result_of(record.outcome) == FAILED
    return is_servers and not record.fell_behind


PROVIDER = "trunkline"
CHAT, EMBEDDINGS, SCORING = "chat", "embeddings", "score"  # operations; OpenTelemetry has no name for the last one
_OF_OUTPUT = {OutputKind.OUTPUT_KIND_VECTOR: EMBEDDINGS, OutputKind.OUTPUT_KIND_SCORE: SCORING}
_OF_ENDPOINT = {
    **dict.fromkeys(("/v1/chat/completions", "/v1/responses", "/v1/messages"), CHAT),
    **dict.fromkeys(("/v1/embeddings", "/pooling", "trunkline.v1.InferenceService/Embed"), EMBEDDINGS),
    **dict.fromkeys(("/v1/rerank", "/rerank", "/v2/rerank", "/v1/score", "/score", "/classify"), SCORING),
    "trunkline.v1.InferenceService/Score": SCORING,
}


def operation_of(record: RequestRecord) -> str:
    """OpenTelemetry's name of what a request asks for. A request that is refused early tells it by its endpoint."""
    return _OF_OUTPUT.get(record.output) or _OF_ENDPOINT.get(record.endpoint, "text_completion")
