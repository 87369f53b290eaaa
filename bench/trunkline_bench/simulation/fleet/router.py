"""One router replica of the simulated fleet: the real index, policy and credits, with delayed messages."""

from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from random import Random
from typing import TypeVar

from trunkline.engine.v1.engine_pb2 import EngineStep
from trunkline.v1.worker_pb2 import CacheEvents, CacheSnapshot, GetModelResponse, LoadSample, WatchCacheResponse
from trunkline_bench.simulation.fleet.baselines import BASELINES, rerouted
from trunkline_router.routing.credit import NO_CREDIT, Credit
from trunkline_router.routing.prefix_index import PrefixIndex, WorkerBlocks
from trunkline_router.routing.route import Route, route_chains
from trunkline_router.routing.route_request import PolicyName, RouteRequest, RoutingPolicy
from trunkline_router.routing.worker_state import InFlight, WorkerState
from trunkline_router.workers.cache_follower import CacheFollower

Key = TypeVar("Key", bound=Hashable)
EPOCH = 1
POLICIES = (*(name.value for name in PolicyName), *BASELINES)


@dataclass(frozen=True, slots=True)
class Flight:
    """A request in flight, and the context that counts it."""

    request: InFlight
    counted: ExitStack


# A worker's message: cache events, a load sample, or a step, in which only this router's requests matter.
News = WatchCacheResponse | LoadSample | EngineStep


class Follower(CacheFollower):
    """A follower that does all of its work at once."""

    def take(self, item: WatchCacheResponse) -> bool:
        """As work()."""
        work = self.work(item)
        while True:
            try:
                next(work)
            except StopIteration as end:
                return bool(end.value)


class FleetRouter:
    """A router that knows of each worker what has arrived so far.

    delay_s: of messages to a worker and back, as real routers learn it from the timelines of requests that have ended
    """

    def __init__(self, models: Sequence[GetModelResponse], policy: str, rng: Random, delay_s: float) -> None:
        self.index = PrefixIndex()
        self.workers = [WorkerState(model, WorkerBlocks(self.index)) for model in models]
        for worker in self.workers:
            worker.steps.took(delay_s)
        self._baseline = BASELINES.get(policy)
        # A baseline replaces the choice of the policy, which is then ignored.
        self._policy = RoutingPolicy(PolicyName.ROUND_ROBIN if self._baseline else policy)
        self._rng = rng
        self._followers = [Follower(worker.blocks, EPOCH) for worker in self.workers]
        self._news: list[deque[tuple[float, News]]] = [deque() for _ in self.workers]
        self._flights: dict[int, Flight] = {}  # by handle
        for follower in self._followers:
            follower.take(WatchCacheResponse(epoch=EPOCH, snapshot=CacheSnapshot(first=True, last=True)))

    @property
    def num_open(self) -> int:
        """Number of requests whose end has not arrived."""
        return len(self._flights)

    def tell(self, worker: int, at_s: float, news: News) -> None:
        """Delivers a message at `at_s`, which must not be earlier than the worker's previous message."""
        self._news[worker].append((at_s, news))

    def hear(self, now_s: float) -> None:
        """Processes the messages that have arrived by `now_s`."""
        for worker, news in enumerate(self._news):
            while news and news[0][0] <= now_s:
                at_s, item = news.popleft()
                self._take(worker, item, at_s)

    def send(self, handle: int, request: RouteRequest, keys: list[int]) -> tuple[Route[WorkerState], float | None]:
        """Chooses a worker, and counts the request there from now on. Returns the predicted time to first token, too;
        None: the policy predicts none. keys: of the prompt"""
        chains = {self.workers[0].kind: keys}  # all workers are of one kind
        found = route_chains(self.index, self.workers, request, chains, self._policy, self._rng)
        if self._baseline is not None:
            found = rerouted(found, self.index, self.workers, self._baseline)
        predicted_s, counted = found.first_token_s(), ExitStack()
        self._flights[handle] = Flight(counted.enter_context(found.in_flight()), counted)
        return found, predicted_s

    def credits(self) -> Mapping[int, Credit]:
        """What this router has sent to each worker."""
        return {place: worker.credit() for place, worker in enumerate(self.workers)}

    def take_foreign(self, others: Iterable[Mapping[int, Credit]]) -> None:
        """Takes the credits of all other routers, as they sent them last."""
        sums = summed(others)
        for place, worker in enumerate(self.workers):
            worker.take_foreign(sums[place])

    def _take(self, worker: int, item: News, at_s: float) -> None:
        state = self.workers[worker]
        if isinstance(item, LoadSample):
            state.take_load(item, at_s)
        elif isinstance(item, WatchCacheResponse):
            assert self._followers[worker].take(item), "events arrive in order and without a gap"
            state.heard(at_s)
        else:
            if self._is_told(item):
                state.steps.ended(at_s)
            self._take_outputs(item)

    def _is_told(self, step: EngineStep) -> bool:
        """Whether a step computed a token of this router's requests."""
        handles = chain(step.token_handles, (output.handle for output in step.outputs if not output.HasField("error")))
        return any(handle in self._flights for handle in handles)

    def _take_outputs(self, step: EngineStep) -> None:
        for output in step.outputs:
            flight = self._flights.get(output.handle)
            if flight is None:
                continue  # of another router
            if output.HasField("prompt"):
                flight.request.has_started(output.prompt.cached_tokens)
            if output.finish_reason or output.HasField("error"):
                flight.counted.close()
                del self._flights[output.handle]


def cache_news(sequence: int, step: EngineStep) -> WatchCacheResponse:
    """The step's cache events, as the worker's front sends them."""
    return WatchCacheResponse(epoch=EPOCH, sequence=sequence, events=CacheEvents(events=step.cache_events))


def summed(told: Iterable[Mapping[Key, Credit]]) -> dict[Key, Credit]:
    """Returns what several routers have sent to each worker, together."""
    sums: dict[Key, Credit] = {}
    for credits in told:
        for key, credit in credits.items():
            before = sums.get(key, NO_CREDIT)
            sums[key] = Credit(before.choices + credit.choices, before.tokens + credit.tokens)
    return sums
