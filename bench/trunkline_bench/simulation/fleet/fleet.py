"""Runs a trace through routers and workers in virtual time, with one order of events.

Before a router acts, every worker is advanced to the time whose messages can have reached that router. Nothing is sent
to a worker before that time, so no engine runs past a request that it should have seen.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from heapq import merge
from itertools import count
from random import Random

from trunkline.block_hash import chain_hashes, packed_blocks, root_hash
from trunkline.engine.v1.engine_pb2 import EngineStep
from trunkline.status import CONTEXT_LENGTH_EXCEEDED
from trunkline.v1.worker_pb2 import GetModelResponse, LoadSample
from trunkline_bench.simulation.fleet.ideal import FleetSizedCache, SharedCache, idle_prefill_s
from trunkline_bench.simulation.fleet.router import EPOCH, FleetRouter, cache_news
from trunkline_bench.simulation.traces.trace_request import TraceRequest
from trunkline_bench.simulation.worker.outcome import Outcome, record
from trunkline_bench.simulation.worker.simulated_worker import (
    FINGERPRINT,
    SimulatedWorker,
    WorkerSpec,
    submit_of,
)
from trunkline_router.routing.prefix_index import keys_of
from trunkline_router.routing.route_request import RouteRequest
from trunkline_worker.engine.messages import Prompt
from trunkline_worker.front.cache_mirror import LOAD_INTERVAL_S
from trunkline_worker.step.lanes import Lane

CHECK_EVERY_S = 5.0  # of virtual time, between checks whether the goal is out of reach


@dataclass(frozen=True, slots=True)
class Fleet:
    """The configuration of a simulated fleet."""

    workers: int
    spec: WorkerSpec
    policy: str
    routers: int = 1
    network_s: float = 0.002  # one way, between a router and a worker, and between routers
    credit_sync_s: float | None = 0.020  # None: routers do not exchange credits
    seed: int = 0


@dataclass(slots=True)
class FleetOutcome(Outcome):
    """The outcome of one request and its routing. Times are those at the router; tokens are of the prompt."""

    worker: int | None = None
    predicted_tokens: int = 0  # cached tokens that the router expected
    ideal_tokens: int = 0  # that an unlimited cache, shared by all workers, would have had
    fitting_tokens: int = 0  # that a shared cache of the fleet's size would have had
    idle_ttft_s: float = 0.0  # of an idle worker with an empty cache
    predicted_ttft_s: float | None = None  # by the router; None: its policy predicts none

    @property
    def delay_s(self) -> float | None:
        """Time to first token minus that of an idle worker with an empty cache. Negative if caches save more."""
        return None if self.ttft_s is None else self.ttft_s - self.idle_ttft_s

    @property
    def ttft_error(self) -> float | None:
        """How far the predicted time to first token was off, relative to the real one."""
        if self.ttft_s is None or self.predicted_ttft_s is None:
            return None
        return abs(self.predicted_ttft_s - self.ttft_s) / self.ttft_s


@dataclass(slots=True)
class FleetRun:
    """The result of a run. If the run was given up, its figures are not valid."""

    fleet: Fleet
    outcomes: list[FleetOutcome]
    workers: list[SimulatedWorker]
    routers: list[FleetRouter]
    from_s: float  # earlier requests only fill the caches and are not counted
    until_s: float  # time of the last arrival
    duration_s: float = 0.0  # time of the last event
    given_up: bool = False
    busy_s: list[float] = field(default_factory=list)  # of each worker, in [from_s, until_s)

    @property
    def counted(self) -> list[FleetOutcome]:
        """The requests that count for figures."""
        return [outcome for outcome in self.outcomes if outcome.request.arrival_s >= self.from_s]


@dataclass(frozen=True, slots=True)
class TtftGoal:
    """A share of requests that must get their first token in time. A run that cannot reach it is given up.

    idle_share: share of an idle worker's time (with an empty cache) that is added to ttft_s, 0 or 1
    """

    ttft_s: float
    share: float = 0.99
    idle_share: float = 0.0

    def allowed(self, num_requests: int) -> int:
        """How many requests may be late."""
        return int(num_requests * (1 - self.share) + 1e-9)


def simulate(
    fleet: Fleet, requests: list[TraceRequest], *, from_s: float = 0.0, goal: TtftGoal | None = None
) -> FleetRun:
    """Runs requests in order of arrival until all are done, or until `goal` is out of reach.

    from_s: earlier requests only fill the caches and are not counted
    """
    return _Simulation(fleet, requests, from_s, goal).run()


class _Simulation:
    """The state of a run."""

    def __init__(self, fleet: Fleet, requests: list[TraceRequest], from_s: float, goal: TtftGoal | None) -> None:
        self._fleet = fleet
        self._requests = requests
        self._from_s = from_s
        self._goal = goal
        self._num_counted = sum(request.arrival_s >= from_s for request in requests)
        self._rng = Random(fleet.seed)
        self._root = root_hash(FINGERPRINT)
        spec, limits = fleet.spec, fleet.spec.limits
        models = [
            GetModelResponse(model=FINGERPRINT, worker_id=f"worker-{number}", epoch=EPOCH, fingerprint=FINGERPRINT,
                             block_size=spec.block_size, context_length=spec.context_length,
                             kv_token_capacity=spec.num_blocks * spec.block_size,
                             max_step_tokens=limits.max_step_tokens, itl_target_ms=limits.itl_target_s * 1e3,
                             interactive_reserve=limits.interactive_reserve,
                             max_running_requests=limits.max_running_requests)
            for number in range(fleet.workers)
        ]  # fmt: skip
        self.outcomes = [FleetOutcome(request) for request in requests]
        self.routers = [
            FleetRouter(models, fleet.policy, Random(self._rng.random()), 2 * fleet.network_s)
            for _ in range(fleet.routers)
        ]
        self.workers = [
            SimulatedWorker(spec, partial(self._on_step, number, count(1)), partial(self._on_load, number),
                        load_phase_s=LOAD_INTERVAL_S * (number + 1) / fleet.workers)
            for number in range(fleet.workers)
        ]  # fmt: skip
        self._ideal = SharedCache()
        self._fitting = FleetSizedCache(fleet.workers * spec.num_blocks)
        self._told = [router.credits() for router in self.routers]
        self._waiting: dict[int, float] = {}  # arrival times of requests without a first token, by handle
        self._late = 0

    def run(self) -> FleetRun:
        requests, fleet = self._requests, self._fleet
        end_s = requests[-1].arrival_s if requests else 0.0
        run = FleetRun(fleet, self.outcomes, self.workers, self.routers, self._from_s, end_s)
        before_s: list[float] | None = None  # busy time of each worker when counting began
        check_s = CHECK_EVERY_S
        for now_s, handle in merge(
            ((request.arrival_s, handle) for handle, request in enumerate(requests)), self._syncs(end_s)
        ):
            self._advance(now_s + fleet.network_s)
            for router in self.routers:
                router.hear(now_s)
            if before_s is None and now_s >= self._from_s:
                before_s = [worker.busy_s for worker in self.workers]
            if handle < 0:
                self._exchange(-handle - 1)
            else:
                self._send(now_s, handle, requests[handle])
            if now_s >= check_s:
                check_s = now_s + CHECK_EVERY_S
                if self._is_missed(now_s):
                    run.given_up = True
                    break
        before_s = before_s or [0.0] * fleet.workers
        run.busy_s = [worker.busy_s - before for worker, before in zip(self.workers, before_s, strict=True)]
        now_s = end_s
        while not run.given_up and any(worker.has_work for worker in self.workers):
            now_s += CHECK_EVERY_S
            self._advance(now_s)
            run.given_up = self._is_missed(now_s)
        if not run.given_up:
            self._advance(float("inf"))
            for router in self.routers:
                router.hear(float("inf"))
        run.duration_s = max((worker.clock.now_s for worker in self.workers), default=0.0)
        return run

    def _advance(self, until_s: float) -> None:
        for worker in self.workers:
            if worker.due_s < until_s:
                worker.advance(until_s)

    def _send(self, now_s: float, handle: int, request: TraceRequest) -> None:
        outcome, fleet = self.outcomes[handle], self._fleet
        if not fleet.spec.can_hold(request):
            outcome.refuse(CONTEXT_LENGTH_EXCEEDED, now_s)
            return
        tokens = request.prompt()
        # Hashed once: the router and the engine would repeat the work.
        packed = packed_blocks(tokens, fleet.spec.block_size)
        prompt = Prompt(tokens, packed, chain_hashes(self._root, packed))
        router = self.routers[self._rng.randrange(len(self.routers)) if len(self.routers) > 1 else 0]
        lane = Lane[request.lane.upper()]
        found, outcome.predicted_ttft_s = router.send(
            handle,
            RouteRequest(tokens, now_s, lane=lane, affinity_key=request.conversation),
            keys_of(b"".join(prompt.digests)),
        )
        place = found.plan.chosen
        outcome.worker = place
        outcome.predicted_tokens = found.plan.matched_tokens
        outcome.ideal_tokens = self._ideal.take(found.chain, len(tokens), fleet.spec.block_size)
        outcome.fitting_tokens = self._fitting.take(found.chain, len(tokens), fleet.spec.block_size)
        outcome.idle_ttft_s = 2 * fleet.network_s + idle_prefill_s(
            fleet.spec.cost, len(tokens), 0, fleet.spec.limits.max_step_tokens
        )
        self._waiting[handle] = now_s
        submit = submit_of(handle, request)
        self.workers[place].submit(now_s + fleet.network_s, submit, lambda: prompt, request.output_tokens)

    def _syncs(self, end_s: float) -> Iterator[tuple[float, int]]:
        """(time, -1 - router) for each time at which a router sends its credits to the others. They take turns."""
        fleet = self._fleet
        if fleet.credit_sync_s is None or fleet.routers == 1:
            return
        turns = count(1)
        while (turn := next(turns)) * fleet.credit_sync_s / fleet.routers < end_s:
            yield turn * fleet.credit_sync_s / fleet.routers, -1 - turn % fleet.routers

    def _exchange(self, number: int) -> None:
        """A router sends its credits, and reads those that the others sent last."""
        self._told[number] = self.routers[number].credits()
        self.routers[number].take_foreign(told for other, told in enumerate(self._told) if other != number)

    def _on_step(self, number: int, sequences: "count[int]", now_s: float, step: EngineStep) -> None:
        at_s = now_s + self._fleet.network_s
        record(step, at_s, self.outcomes)
        for output in step.outputs:
            if output.HasField("prompt"):
                self._has_started(output.handle, at_s)
            elif output.HasField("error"):
                self._has_started(output.handle, float("inf"))
        events = cache_news(next(sequences), step) if step.cache_events else None
        repeated = EngineStep(token_handles=step.token_handles)
        for router in self.routers:
            for done_s in self.workers[number].repeats_done_s:
                router.tell(number, done_s + self._fleet.network_s, repeated)
            if events is not None:
                router.tell(number, at_s, events)
            router.tell(number, at_s, step)

    def _on_load(self, number: int, now_s: float, load: LoadSample) -> None:
        for router in self.routers:
            router.tell(number, now_s + self._fleet.network_s, load)

    def _has_started(self, handle: int, at_s: float) -> None:
        arrival_s = self._waiting.pop(handle, None)
        if arrival_s is not None and self._is_late(handle, arrival_s, at_s):
            self._late += 1

    def _is_late(self, handle: int, arrival_s: float, now_s: float) -> bool:
        goal = self._goal
        if goal is None or arrival_s < self._from_s:
            return False
        return now_s - arrival_s > goal.ttft_s + goal.idle_share * self.outcomes[handle].idle_ttft_s

    def _is_missed(self, now_s: float) -> bool:
        if self._goal is None:
            return False
        late = self._late + sum(self._is_late(handle, arrival_s, now_s) for handle, arrival_s in self._waiting.items())
        return late > self._goal.allowed(self._num_counted)
