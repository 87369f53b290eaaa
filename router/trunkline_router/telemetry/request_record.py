"""What became of one request in this router, and when.

The stages of the path that all protocols share fill the record in while the request runs: a few attributes per request,
none per token. Listeners read it once, when the request has ended. It never holds content: no prompt, output or
credential. Times that end in `_s` are on the router's monotonic clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.worker_pb2 import Timeline
from trunkline_router.routing.policy import Candidate, RoutePlan

GENERATE, GRANT = "generate", "grant"  # RequestRecord.method
GRPC, HTTP = "grpc", "http"  # RequestRecord.protocol
CANCELLED = "cancelled"  # RequestRecord.outcome, and AttemptRecord.ended
COMPLETE = "complete"  # AttemptRecord.ended

MOST_CANDIDATES = 8  # that are told of a placement: the chosen worker and the next best
MOST_NOTED = 16  # placements and attempts that a record keeps; a request that has more of them keeps the latest


class Interval(NamedTuple):
    """A part of a request's time."""

    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class PlacementRecord:
    """One decision for a worker. `time` includes the wait until there was a worker to choose."""

    time: Interval
    plan: RoutePlan  # holds nothing of the prompt

    @property
    def worker(self) -> str:
        return self.plan.worker_id

    @property
    def predicted_ttft_s(self) -> float | None:
        """What the policy predicted of the chosen worker; None if the policy predicts nothing."""
        prediction = self.plan.prediction
        return None if prediction is None else float(prediction.cost_s[self.plan.chosen])

    def candidates(self, most: int = MOST_CANDIDATES) -> Sequence[Candidate]:
        """The chosen worker, then the others from best to worst, with the terms of their costs. Computed anew by each
        call."""
        return self.plan.best(most)


@dataclass(slots=True)
class AttemptRecord:
    """One worker that the request was sent to; or, of the direct path, a grant for it.

    resumed_at_tokens: output tokens of earlier attempts, that this one continued after
    price_per_hour: of the worker; 0.0 if it has none
    first_output_s, last_output_s: when output was first and last handed on to the client's side; None: there was none
    ended: COMPLETE, CANCELLED, or a reason of the error table
    problem: why the worker was lost, in one line without content; "" unless another attempt followed or might have
    timelines: what the worker says of the choices that ended there. Checked: times are in order and within the attempt
    """

    worker: str
    started_s: float
    span_id: int = 0
    resumed_at_tokens: int = 0
    price_per_hour: float = 0.0
    first_output_s: float | None = None
    last_output_s: float | None = None
    ended_s: float | None = None
    ended: str = CANCELLED
    problem: str = ""
    timelines: list[Timeline] = field(default_factory=list)

    @property
    def is_retried(self) -> bool:
        """Whether the worker was lost or refused the request."""
        return self.ended not in (COMPLETE, CANCELLED)


@dataclass(slots=True)
class RequestRecord:
    """A request's record. Fields that are not known yet, or never become known, have their defaults.

    method: GENERATE or GRANT
    protocol: GRPC or HTTP
    endpoint: the HTTP path, for example "/v1/chat/completions", or the RPC's full name without a leading slash
    trace_id: 128 bits; the request's in all processes
    span_id, parent_span_id: 64 bits; of the router's own span, and of the caller's. 0: the caller has none
    is_sampled: whether the trace was chosen when the request began, so that all processes export their spans of it
    sampling: the parameters with all defaults filled in; None once the listeners were told
    completion_tokens: of all choices together
    prompt_tokens, cached_tokens: of the prompt, which all choices share
    outcome: the choices' finish reasons, without repetition, joined by commas; else CANCELLED, or a reason of the error
        table in capitals; of a grant "granted"
    code: of the gRPC status; 0: OK
    stalled_s: time in which output waited for a client that did not read
    """

    request_id: str
    started_s: float
    started_unix_ns: int
    method: str = GENERATE
    protocol: str = GRPC
    endpoint: str = ""
    trace_id: int = 0
    span_id: int = 0
    parent_span_id: int = 0
    tracestate: str = ""
    is_sampled: bool = False
    tenant: str = ""
    lane: str = ""
    model: str = ""
    sampling: SamplingParams | None = None
    prompt_tokens: int = 0
    choices: int = 0
    max_tokens: int | None = None
    cached_tokens: int = 0
    completion_tokens: int = 0
    tokenized: Interval | None = None
    admitted: Interval | None = None  # by the tenant's quotas
    placements: list[PlacementRecord] = field(default_factory=list)
    attempts: list[AttemptRecord] = field(default_factory=list)
    grants: int = 0
    first_token_s: float | None = None  # when output was first handed on to the client's side
    ended_s: float | None = None
    outcome: str = CANCELLED
    code: int = 0
    stalled_s: float = 0.0

    @property
    def is_failed(self) -> bool:
        """Whether the outcome is a reason of the error table."""
        return self.outcome.isupper()

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
        return sum(attempt.resumed_at_tokens > 0 for attempt in self.attempts)

    @property
    def silences_s(self) -> list[float]:
        """The pauses of the answer while it moved to another worker: from the last output of one attempt to the first
        of the next."""
        silences = []
        last_s: float | None = None
        for attempt in self.attempts:
            if last_s is not None and attempt.first_output_s is not None:
                silences.append(attempt.first_output_s - last_s)
            last_s = last_s if attempt.last_output_s is None else attempt.last_output_s
        return silences

    @property
    def cost(self) -> float | None:
        """The price of the device time that its workers report, in the currency of --price-per-hour; None if no worker
        has a price."""
        priced = [attempt for attempt in self.attempts if attempt.price_per_hour]
        if not priced:
            return None
        per_second = [(attempt.price_per_hour / 3600.0, attempt.timelines) for attempt in priced]
        return sum(price * timeline.device_s for price, timelines in per_second for timeline in timelines)


class RequestListener(Protocol):
    """Is told of each request that has ended. If it fails, that is logged, and fails no request."""

    def request_ended(self, record: RequestRecord) -> None:
        """Reads the record, and may keep it. Called on the event loop, so it must be quick."""
        ...
