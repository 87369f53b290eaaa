"""What a router knows of one worker that serves: its model, its cache, its load, and what was sent there.

No I/O and no clock: the simulated fleet routes by the same numbers.

A load sample lags: it may or may not include what was sent since the one before it. So what this router has sent and
not heard a first output of is kept in two ages. What is younger than the last sample is added to it. What is older than
that but younger than the sample before counts as far as the sample says less. Anything older is in the sample.
Other routers tell what they have sent and not heard the end of (`credit`), which the sample may or may not include:
it counts as the middle age does.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from math import inf, nan

from trunkline.v1.worker_pb2 import GetModelResponse, LoadSample
from trunkline.validation import max_total_tokens
from trunkline_router.routing.accuracy import Freshness, IndexAccuracy
from trunkline_router.routing.credit import NO_CREDIT, Credit
from trunkline_router.routing.policy import RoutePlan
from trunkline_router.routing.route_request import NUM_LANES, RouteRequest
from trunkline_router.routing.worker_blocks import WorkerBlocks
from trunkline_router.routing.worker_facts import ROW, WorkerFacts, hash_53

Kind = tuple[str, int]  # fingerprint and block size: workers of one kind name blocks alike

# Where a worker does not say what its running choices hold.
ASSUMED_CONTEXT_TOKENS = 1024
DEFAULT_STEP_TOKENS = 2048
# Weight of the latest request in what is typical of a worker's requests.
LATEST_SHARE = 0.1


class WorkerState:
    """See the module. `slow_start_share` is set by others."""

    def __init__(self, model: GetModelResponse, blocks: WorkerBlocks) -> None:
        self.model = model
        self.blocks = blocks
        # Asked for every worker in every decision: read once.
        self.worker_id, self.model_name = model.worker_id, model.model
        self.most_tokens = max_total_tokens(model)
        self.kind: Kind = (model.fingerprint, model.block_size)
        self.accuracy = IndexAccuracy()
        self.routed_by_load = False
        # What this router has sent there and not heard the end of:
        self.open_choices = 0
        self.granted_choices = 0  # of these, whether they ever come there is their clients' affair
        self.queued_tokens = 0  # uncached tokens of requests without a first output
        self._freshness = Freshness()
        self._is_stale = False
        self._load = LoadSample()
        self._fresh, self._young = _Age(), _Age()
        self._context_tokens = 0.0  # typical (query, key) pairs of a prompt's token
        self._slow_start_share = 1.0
        self._foreign = NO_CREDIT
        self._name_hash = float(hash_53(self.worker_id))
        self._row: bytes | None = None  # of the table of all workers, while nothing has changed

    @property
    def accepts(self) -> bool:
        return not self._load.draining

    # What others tell

    @property
    def load(self) -> LoadSample:
        """The worker's last sample."""
        return self._load

    def take_load(self, sample: LoadSample, now_s: float) -> None:
        """What the worker says of its load."""
        self._load = sample
        self._young, self._fresh = self._fresh, _Age()
        self._row = None
        self.heard(now_s)

    def heard(self, now_s: float) -> None:
        """Something came on the watch stream."""
        self._freshness.heard(now_s)
        self._is_stale = False
        self._review()

    @property
    def slow_start_share(self) -> float:
        """How much of a full share of requests it takes while it is fresh: in (0, 1]; 1 is all of it."""
        return self._slow_start_share

    @slow_start_share.setter
    def slow_start_share(self, share: float) -> None:
        if share != self._slow_start_share:
            self._slow_start_share, self._row = share, None

    @property
    def foreign(self) -> Credit:
        """What other routers have sent there."""
        return self._foreign

    def take_foreign(self, credit: Credit) -> None:
        """What other routers have sent there, as they have told it last."""
        if credit != self._foreign:
            self._foreign, self._row = credit, None

    def credit(self) -> Credit:
        """What this router has sent there and not heard the end of: for the others."""
        return Credit(self.open_choices, self.queued_tokens)

    # What is sent there

    @contextmanager
    def in_flight(
        self, request: RouteRequest, plan: RoutePlan, chain: Sequence[int], *, is_granted: bool = False
    ) -> Iterator["InFlight"]:
        """Counts a request here from dispatch to its end, whichever way it ends."""
        flight = InFlight(self, request, plan.matched_tokens, chain, is_granted=is_granted)
        try:
            yield flight
        finally:
            flight.end()

    def distrust(self, now_s: float) -> str:
        """Why its reports of its cache do not count now, in one line; empty where they do."""
        if self.is_stale(now_s):
            return "routed by load: it has work, and its events have stopped coming"
        if self.accuracy.is_low:
            return f"routed by load: of what its index promised of late, {self.accuracy.share:.0%} was cached"
        return "routed by load until it is heard of" if self.routed_by_load else ""

    def is_stale(self, now_s: float) -> bool:
        """Whether its events have stopped coming although it has work."""
        return self._freshness.is_stale(now_s, has_work=self._has_work)

    @property
    def _has_work(self) -> bool:
        """For certain: what is granted may never come."""
        return self.open_choices > self.granted_choices or self._load.running + self._load.waiting > 0

    def _review(self) -> None:
        """Whether its reports count from now on."""
        by_load = self._is_stale or self.accuracy.is_low
        if by_load == self.routed_by_load:
            return
        self.routed_by_load, self._row = by_load, None
        if by_load:
            self.blocks.rely_on_dispatches()
        else:
            self.blocks.rely_on_reports()
        self.on_turn()

    def on_turn(self) -> None:
        """`routed_by_load` has changed: for those who tell people."""

    # For the policy

    def row(self) -> bytes:
        """The facts, packed."""
        if self._row is None:
            self._row = ROW.pack(*self.facts())
        return self._row

    def facts(self) -> WorkerFacts[float]:
        """What the policy reads."""
        load, model, fresh, young = self._load, self.model, self._fresh, self._young
        queued = [
            max(reported, sent + self._foreign.tokens) + new
            for reported, sent, new in zip(
                accumulate(_queued_by_lane(load)), accumulate(young.tokens), accumulate(fresh.tokens), strict=True
            )
        ]
        reported_choices = load.running + load.waiting
        choices = max(reported_choices, young.choices + self._foreign.choices) + fresh.choices
        if load.running:
            held_tokens = load.running_kv_tokens or load.kv_live_blocks * model.block_size
            context_tokens = held_tokens / load.running
        else:
            context_tokens = self._context_tokens
        fresh_blocks = sum(fresh.tokens) / max(1, model.block_size)
        step_tokens = float(model.max_step_tokens or DEFAULT_STEP_TOKENS)
        cost = load.step_cost if load.HasField("step_cost") else None
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
            waiting_tokens=max(load.waiting_tokens, sum(young.tokens) + self._foreign.tokens),
            queued_context=self._context_tokens,
            choices=choices,
            most_running=model.max_running_requests or inf,
            decode_kv_tokens=(context_tokens or ASSUMED_CONTEXT_TOKENS) * choices,
            block_size=model.block_size or 1,
            live_blocks=load.kv_live_blocks + fresh_blocks,
            available_blocks=max(0.0, load.kv_free_blocks + load.kv_cached_blocks - fresh_blocks),
            total_blocks=load.kv_live_blocks + load.kv_free_blocks + load.kv_cached_blocks,
            **self._admission_s(fresh.choices),
            slow_start_share=self._slow_start_share,
            by_load=self.routed_by_load,
            name_hash=self._name_hash,
        )

    def _admission_s(self, fresh_choices: int) -> dict[str, float]:
        """When what waits will have been admitted, and what was sent since after it at the same rate."""
        load = self._load
        times_s = [0.0] * NUM_LANES
        if load.waiting and len(load.retry_delay_ms_by_lane) == len(load.waiting_by_lane) == NUM_LANES:
            for lane, waiting in enumerate(accumulate(load.waiting_by_lane)):
                if waiting:
                    times_s[lane] = load.retry_delay_ms_by_lane[lane] / 1e3 * (waiting + fresh_choices) / waiting
        return {
            "admission_interactive_s": times_s[0],
            "admission_standard_s": times_s[1],
            "admission_batch_s": times_s[2],
        }


class _Age:
    """What was sent in one age."""

    __slots__ = ("choices", "tokens")

    def __init__(self) -> None:
        self.tokens = [0] * NUM_LANES
        self.choices = 0


class InFlight:
    """A request's part in its worker's load. Ends of all kinds are harmless when repeated."""

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
        self._queued = len(request.prompt) - matched_tokens
        self._chain = chain
        self._promised_tokens: int | None = None  # None: nothing is to be learned from this request
        if request.may_use_cache:
            block_size = worker.model.block_size
            self._promised_tokens = min(worker.blocks.reported(chain) * block_size, request.most_reusable(block_size))
        if not worker._has_work and not is_granted:
            worker._freshness.expected(request.now_s)
        worker._is_stale = worker.is_stale(request.now_s)
        worker._review()
        worker.open_choices += self._choices
        worker.granted_choices += self._choices * is_granted
        worker.queued_tokens += self._queued
        worker._context_tokens += LATEST_SHARE * (matched_tokens + self._queued / 2 - worker._context_tokens)
        self._credit = worker._fresh
        self._credit.tokens[self._lane] += self._queued
        self._credit.choices += self._choices
        worker._row = None
        worker.blocks.expect(chain)

    def has_started(self, cached_tokens: int | None = None) -> None:
        """Its prompt is computed, or never will be: it queues no longer.

        cached_tokens: of the prompt, found in the worker's cache; None: it was not said
        """
        worker = self._worker
        worker.queued_tokens -= self._queued
        self._credit.tokens[self._lane] -= self._queued
        self._queued = 0
        worker._row = None
        if cached_tokens is not None and self._promised_tokens is not None:
            worker.accuracy.add(self._promised_tokens, cached_tokens)
            self._promised_tokens = None
            worker.blocks.remember(self._chain)
            worker._review()

    def end(self) -> None:
        """The worker does nothing for it any more."""
        self.has_started()
        self._worker.open_choices -= self._choices
        self._worker.granted_choices -= self._choices * self._is_granted
        self._credit.choices -= self._choices
        self._choices = 0
        self._worker.blocks.stop_expecting(self._chain)
        self._chain = ()


def _queued_by_lane(load: LoadSample) -> list[float]:
    """Uncached tokens of prompts that wait or are being computed. A worker of the previous protocol gives their sum:
    it is shared out as those that wait are."""
    if load.uncached_tokens_by_lane:
        return [float(tokens) for tokens in load.uncached_tokens_by_lane]
    waiting = sum(load.waiting_by_lane)
    if not waiting:
        return [float(load.waiting_uncached_tokens), 0.0, 0.0]
    return [load.waiting_uncached_tokens * count / waiting for count in load.waiting_by_lane]
