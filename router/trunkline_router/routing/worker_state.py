"""What a router knows of one worker: its model, its cache, its load, and the requests that were sent to it.

No I/O and no clock: the simulated fleet routes by the same numbers.

A load sample lags: it may or may not include requests that were sent since the previous sample. So this router's
requests without a first output are kept in two ages. Requests younger than the last sample are added to it. Requests
older than that but younger than the previous sample are a lower bound on what the sample says. Older requests are in
the sample. Other routers report the requests that they have sent and that have not ended (`credit`); the sample may or
may not include these, so they count like the second age.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import inf, nan
from typing import NamedTuple

from trunkline.v1.worker_pb2 import GetModelResponse, LoadSample
from trunkline.validation import max_total_tokens
from trunkline_router.routing.credit import NO_CREDIT, Credit
from trunkline_router.routing.prefix_index import WorkerBlocks
from trunkline_router.routing.route_request import NUM_LANES, RouteRequest
from trunkline_router.routing.step_times import StepTimes
from trunkline_router.routing.worker_facts import ROW, WorkerFacts, hash_53

Kind = tuple[str, int]  # fingerprint and block size: workers of one kind have the same block hashes

# For workers that do not report the context of their running choices.
ASSUMED_CONTEXT_TOKENS = 1024
DEFAULT_STEP_TOKENS = 2048
# Weight of the latest request in a worker's moving averages.
LATEST_SHARE = 0.1
KEPT_REQUESTS = 200
LEAST_ACCURACY = 0.9
# The index is judged only after this many requests for which it promised tokens.
LEAST_PROMISES = 20
# A worker that computes reports its load twenty times a second, or after each step if steps are longer. If it sends
# nothing for this long, the worker or its stream has stalled.
STALE_AFTER_S = 5.0


class WorkerState:
    """The state of one worker, as the routing policy reads it."""

    def __init__(self, model: GetModelResponse, blocks: WorkerBlocks, steps: StepTimes | None = None) -> None:
        self.model = model
        self.blocks = blocks
        self.steps = steps or StepTimes()
        # Copied, because every decision reads them for every worker.
        self.worker_id, self.model_name = model.worker_id, model.model
        self.most_tokens = max_total_tokens(model)
        self.kind: Kind = (model.fingerprint, model.block_size)
        self.accuracy = IndexAccuracy()
        self.routed_by_load = False
        # Requests that this router has sent and that have not ended:
        self.open_choices = 0
        self.granted_choices = 0  # of these, those that clients take there with grants, or not
        self.queued_tokens = 0  # uncached tokens of requests without a first output
        self._prompts: dict[InFlight, SentPrompt] = {}  # of these requests, in the order in which they were sent
        self._heard_s: float | None = None  # last message, or when an idle worker was given work; None: neither yet
        self._is_stale = False
        self.load = LoadSample()  # the last one
        self._fresh, self._young = _Age(), _Age()
        self._context_tokens = 0.0  # typical (query, key) pairs of a prompt's token
        self.slow_start_share = 1.0
        self.foreign = NO_CREDIT
        self._name_hash = float(hash_53(self.worker_id))
        self._row: bytes | None = None  # of the table of all workers; None after a change

    # Reports from the worker and from other routers

    def take_load(self, sample: LoadSample, now_s: float) -> None:
        """Takes the worker's load sample."""
        self.load = sample
        self._young, self._fresh = self._fresh, _Age()
        self._row = None
        self.heard(now_s)

    def heard(self, now_s: float) -> None:
        """A message arrived on the watch stream."""
        self._heard_s, self._is_stale = now_s, False
        self._review()

    def take_share(self, share: float) -> None:
        """Takes the part of a full share of requests that it gets while it is new: in (0, 1]."""
        if share != self.slow_start_share:
            self.slow_start_share, self._row = share, None

    def take_foreign(self, credit: Credit) -> None:
        """Takes what other routers have sent to it, as last reported."""
        if credit != self.foreign:
            self.foreign, self._row = credit, None

    def credit(self) -> Credit:
        """Returns this router's requests there that have not ended, for the other routers."""
        return Credit(self.open_choices, self.queued_tokens)

    def prompts_sent(self) -> Iterable["SentPrompt"]:
        """Returns the prompts of this router's requests there without a first output, in the order of sending."""
        return self._prompts.values()

    # Whether its reports count

    def distrust(self, now_s: float) -> str:
        """Returns why its cache reports do not count now, in one line; "" if they do."""
        if self.is_stale(now_s):
            return "routed by load: it has work, but its events have stopped"
        if self.accuracy.is_low:
            return f"routed by load: only {self.accuracy.share:.0%} of what its index promised recently was cached"
        return "routed by load until its events resume" if self.routed_by_load else ""

    def is_stale(self, now_s: float) -> bool:
        """Whether its events have stopped although it has work."""
        return self.index_age_s(now_s) > STALE_AFTER_S

    def index_age_s(self, now_s: float) -> float:
        """Time since its last message about its cache or load; 0 while it has no work, and so nothing to tell."""
        return 0.0 if self._heard_s is None or not self._has_work else now_s - self._heard_s

    @property
    def _has_work(self) -> bool:
        """Whether it certainly has work: granted requests may never arrive."""
        return self.open_choices > self.granted_choices or self.load.running + self.load.waiting > 0

    def _review(self) -> None:
        """Decides whether its cache reports count from now on."""
        by_load = self._is_stale or self.accuracy.is_low
        if by_load == self.routed_by_load:
            return
        self.routed_by_load, self._row = by_load, None
        self.blocks.count_reports(count=not by_load)
        self.on_turn()

    def on_turn(self) -> None:
        """Called when `routed_by_load` has changed; overridden to log it."""

    # For the policy

    def row(self) -> bytes:
        """Returns the facts, packed as one row of the table."""
        if self._row is None:
            self._row = ROW.pack(*self.facts())
        return self._row

    def facts(self) -> WorkerFacts[float]:
        """Returns the numbers that the policy reads."""
        load, model, fresh, young = self.load, self.model, self._fresh, self._young
        queued = [
            max(reported, sent + self.foreign.tokens) + new
            for reported, sent, new in zip(
                accumulate(_queued_by_lane(load)), accumulate(young.tokens), accumulate(fresh.tokens), strict=True
            )
        ]
        reported_choices = load.running + load.waiting
        choices = max(reported_choices, young.choices + self.foreign.choices) + fresh.choices
        if load.running:
            held_tokens = load.running_kv_tokens or load.kv_live_blocks * model.block_size
            context_tokens = held_tokens / load.running
        else:
            context_tokens = self._context_tokens
        fresh_blocks = sum(fresh.tokens) / max(1, model.block_size)
        step_tokens = float(model.max_step_tokens or DEFAULT_STEP_TOKENS)
        cost = load.step_cost if load.HasField("step_cost") else None
        admission_s = _admission_s(load, fresh.choices)
        return WorkerFacts(
            fixed_s=nan if cost is None else cost.fixed_s,
            token_s=nan if cost is None else cost.token_s,
            kv_token_s=nan if cost is None else cost.kv_token_s,
            pair_s=nan if cost is None else cost.pair_s,
            step_tokens=step_tokens,
            lower_step_tokens=step_tokens * (1.0 - model.interactive_reserve),
            step_target_s=model.itl_target_ms / 1e3 or inf,
            queued_interactive=queued[0],
            queued_standard=queued[1],
            queued_batch=queued[2],
            waiting_tokens=max(load.waiting_tokens, sum(young.tokens) + self.foreign.tokens),
            queued_context=self._context_tokens,
            choices=choices,
            most_running=model.max_running_requests or inf,
            decode_kv_tokens=(context_tokens or ASSUMED_CONTEXT_TOKENS) * choices,
            block_size=model.block_size or 1,
            live_blocks=load.kv_live_blocks + fresh_blocks,
            available_blocks=max(0.0, load.kv_free_blocks + load.kv_cached_blocks - fresh_blocks),
            total_blocks=load.kv_live_blocks + load.kv_free_blocks + load.kv_cached_blocks,
            admission_interactive_s=admission_s[0],
            admission_standard_s=admission_s[1],
            admission_batch_s=admission_s[2],
            slow_start_share=self.slow_start_share,
            by_load=self.routed_by_load,
            name_hash=self._name_hash,
        )


class SentPrompt(NamedTuple):
    """A prompt that its worker may not have computed."""

    sent_s: float
    lane: int
    tokens: float  # that are left to compute
    context: float  # typical (query, key) pairs of a token


class _Age:
    """The requests of one age."""

    __slots__ = ("choices", "tokens")

    def __init__(self) -> None:
        self.tokens = [0] * NUM_LANES
        self.choices = 0


class InFlight:
    """A request's part in its worker's load, from now until the end of a context. Its methods may be called repeatedly.

    is_granted: the client takes it there with a grant, or never does
    """

    def __init__(
        self,
        worker: WorkerState,
        request: RouteRequest,
        matched_tokens: int,
        chain: Sequence[int],
        *,
        is_granted: bool = False,
    ) -> None:
        self._worker = worker
        self._is_granted = is_granted
        self._lane = request.lane
        self._choices = request.choices
        own = len(request.prompt) - matched_tokens  # uncached tokens
        self._queued = own + request.beside_tokens
        self._chain = chain
        self._promised_tokens: int | None = None  # None: the request does not count for the accuracy
        if request.may_use_cache:
            block_size = worker.model.block_size
            self._promised_tokens = min(worker.blocks.reported(chain) * block_size, request.most_reusable(block_size))
        if not worker._has_work and not is_granted:
            worker._heard_s = request.now_s
            worker.steps.begins(request.now_s)
        worker._is_stale = worker.is_stale(request.now_s)
        worker._review()
        worker.open_choices += self._choices
        worker.granted_choices += self._choices * is_granted
        worker.queued_tokens += self._queued
        context = matched_tokens + own / 2
        worker._context_tokens += LATEST_SHARE * (context - worker._context_tokens)
        worker._prompts[self] = SentPrompt(request.now_s, self._lane, self._queued, context)
        self._credit = worker._fresh
        self._credit.tokens[self._lane] += self._queued
        self._credit.choices += self._choices
        worker._row = None
        worker.blocks.expect(chain)

    def __enter__(self) -> "InFlight":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def has_computed(self, tokens: int) -> None:
        """So many of the tokens no longer queue: of several prompts, those of one."""
        worker, tokens = self._worker, min(tokens, self._queued)
        worker.queued_tokens -= tokens
        self._credit.tokens[self._lane] -= tokens
        self._queued -= tokens
        if not self._queued:
            worker._prompts.pop(self, None)
        worker._row = None

    def has_started(self, cached_tokens: int | None = None) -> None:
        """The prompt is computed, or never will be: the request no longer queues.

        cached_tokens: prompt tokens found in the worker's cache; None: not reported
        """
        worker = self._worker
        self.has_computed(self._queued)
        if cached_tokens is not None and self._promised_tokens is not None:
            worker.accuracy.add(self._promised_tokens, cached_tokens)
            self._promised_tokens = None
            worker._review()

    def end(self) -> None:
        """The worker no longer works on the request."""
        self.has_started()
        self._worker.open_choices -= self._choices
        self._worker.granted_choices -= self._choices * self._is_granted
        self._credit.choices -= self._choices
        self._choices = 0
        self._worker.blocks.stop_expecting(self._chain)
        self._chain = ()


class IndexAccuracy:
    """The share of promised prompt tokens that were found cached, over the last requests."""

    def __init__(self) -> None:
        self._kept: deque[tuple[int, int]] = deque(maxlen=KEPT_REQUESTS)  # (promised tokens, those of them found)
        self._promised = self._found = self._promises = 0
        self.promised_so_far = self.found_so_far = 0  # tokens, of all requests

    @property
    def num_requests(self) -> int:
        """Number of requests that it is computed from."""
        return len(self._kept)

    @property
    def share(self) -> float:
        """From 0 to 1; 1 if nothing was promised."""
        return self._found / self._promised if self._promised else 1.0

    @property
    def is_low(self) -> bool:
        """Whether it is too low to rely on. It recovers, because requests count even while the index is not used."""
        return self._promises >= LEAST_PROMISES and self.share < LEAST_ACCURACY

    def add(self, promised_tokens: int, cached_tokens: int) -> None:
        """Adds a request: how much of its prompt was promised, and how much was found in the cache."""
        if len(self._kept) == KEPT_REQUESTS:
            self._count(*self._kept[0], sign=-1)
        self._kept.append((promised_tokens, min(promised_tokens, cached_tokens)))
        promised, found = self._kept[-1]
        self._count(promised, found, sign=1)
        self.promised_so_far += promised
        self.found_so_far += found

    def _count(self, promised: int, found: int, *, sign: int) -> None:
        self._promised += sign * promised
        self._found += sign * found
        self._promises += sign * (promised > 0)


def _queued_by_lane(load: LoadSample) -> list[float]:
    """Returns the uncached tokens of waiting and running prompts, by lane."""
    return [float(tokens) for tokens in load.uncached_tokens_by_lane] or [0.0, 0.0, 0.0]


def _admission_s(load: LoadSample, fresh_choices: int) -> list[float]:
    """Returns the time until all waiting choices are admitted, by lane; those sent since extend it at the same rate."""
    times_s = [0.0] * NUM_LANES
    if load.waiting and len(load.retry_delay_ms_by_lane) == len(load.waiting_by_lane) == NUM_LANES:
        for lane, waiting in enumerate(accumulate(load.waiting_by_lane)):
            if waiting:
                times_s[lane] = load.retry_delay_ms_by_lane[lane] / 1e3 * (waiting + fresh_choices) / waiting
    return times_s
