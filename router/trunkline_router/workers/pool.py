"""The workers of each model, and the limits and tokenizer of the model.

Before a request is refused for lack of a worker, the router searches for one: a worker that was absent at the last
attempt may have started since, and another router may use it already.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from random import Random

from trunkline.status import CODE_NOT_FOUND, MODEL_NOT_FOUND, RequestRefused, no_worker
from trunkline.v1.worker_pb2 import GetModelResponse
from trunkline_router.prompts.tokenizer import PromptTokenizer
from trunkline_router.routing.hot_prefixes import HotPrefixes
from trunkline_router.routing.prefix_index import PrefixIndex
from trunkline_router.routing.route import Route, route
from trunkline_router.routing.route_request import RouteRequest, RoutingPolicy
from trunkline_router.workers.connected_worker import ConnectedWorker
from trunkline_router.workers.pool_terms import Terms, agreed, deviation, limits_of, most_common
from trunkline_router.workers.worker_link import ANSWERED_AT_MOST_S, ConnectAttempts, WorkerLink
from trunkline_runtime.log import get_logger

LOOK_AT_MOST_S = 1.0
APART_S = 0.2  # between two attempts that a search starts at one address, however many requests wait
# The same if only unknown models are searched for: a client can invent any name.
UNKNOWN_APART_S = 0.5
STEP_S = 0.005  # at most one attempt is started in this time
MOST_LOOKING = 1000  # requests that wait for a search, and are held in memory meanwhile
PATIENCE_SHARE = 0.5  # of the time left to a request, which needs the rest for an answer or another try


@dataclass(slots=True)
class _Look:
    """A search for one model, by all requests that asked for it within one step. Attempts that begin later count."""

    name: str
    is_known: bool
    begun_s: float = inf
    over: asyncio.Event = field(default_factory=asyncio.Event)


class PoolSearch:
    """Brings forward the attempts to connect to missing workers, and the lookups of names that stand for workers, while
    a request searches for one. Addresses are independent, and an address that a lookup adds counts at once.

    - A search lasts at most LOOK_AT_MOST_S, or ANSWERED_AT_MOST_S if a worker of the model has answered and is being
      connected, and at most half of the time left to the request. It ends sooner if every address has failed since it
      began, or has been silent for SILENT_AT_MOST_S in the present attempt.
    - An address that pauses is tried within APART_S plus one STEP_S for each missing address. Beyond about 150 missing
      addresses a search does not reach all of them.
    - All searches together start at most one attempt per STEP_S, and at one address one per APART_S, or one per
      UNKNOWN_APART_S if only unknown models are searched for. Without a search there is no cost.

    At most MOST_LOOKING requests search. A tenant's requests may take at most half of the places that others leave.
    """

    def __init__(
        self,
        links: Callable[[], Sequence[WorkerLink]],
        has: Callable[[str], bool],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`has`: whether the model has a ready worker; for an empty name, whether any model has."""
        self.lookups: list[ConnectAttempts] = []  # of names that stand for workers
        self._links = links
        self._has = has
        self._clock_s = clock_s
        self._known: set[str] = set()
        self._looking: Counter[str] = Counter()  # by tenant
        self._coming: dict[str, _Look] = {}  # by name: searches that begin with the next step
        self._looks: list[_Look] = []
        self._steps: asyncio.Task[None] | None = None

    def knows(self, name: str) -> bool:
        """Whether any worker has ever served the model."""
        return name in self._known or any(link.model is not None and link.model.model == name for link in self._links())

    def served(self, names: Iterable[str]) -> None:
        """Records that workers serve these models."""
        self._known.update(names)

    async def look_for(self, name: str, tenant: str, time_left_s: float | None = None) -> None:
        """Returns when a worker of the model (for an empty name, of any model) is found, or the search has failed."""
        if self._has(name) or not self._missing():
            return
        if self._looking[tenant] >= MOST_LOOKING - self._looking.total():
            return
        most_s = ANSWERED_AT_MOST_S
        if time_left_s is not None:
            most_s = min(most_s, time_left_s * PATIENCE_SHARE)
        self._looking[tenant] += 1
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(most_s):
                    await self._look(name).over.wait()
        finally:
            self._looking[tenant] -= 1
            if not self._looking[tenant]:
                del self._looking[tenant]

    def _look(self, name: str) -> _Look:
        """Returns the search for a name that begins with the next step."""
        if name not in self._coming:
            self._coming[name] = _Look(name, is_known=not name or self.knows(name))
        if self._steps is None or self._steps.done():
            self._steps = asyncio.create_task(self._run())
        return self._coming[name]

    async def _run(self) -> None:
        while self._coming or self._looks:
            self._step(self._clock_s())
            await asyncio.sleep(STEP_S)

    def _step(self, now_s: float) -> None:
        for look in self._coming.values():
            look.begun_s = now_s
        self._looks += self._coming.values()
        self._coming = {}
        missing = self._missing()
        self._end_looks(missing, now_s)
        if self._looks:
            self._hurry_one(missing, now_s)

    def _end_looks(self, missing: Sequence[ConnectAttempts], now_s: float) -> None:
        under_way = [attempts for attempts in missing if attempts.may_succeed(now_s)]
        connecting = {attempts.model for attempts in under_way if attempts.model is not None}
        # Addresses that have answered with another model are not waited for.
        awaited = [attempts for attempts in missing if attempts.is_paused]
        awaited += [attempts for attempts in under_way if attempts.model is None]
        all_tried_since_s = min((attempts.tried_s for attempts in awaited), default=inf)
        going_on = []
        for look in self._looks:
            is_connecting = look.name in connecting if look.name else bool(connecting)
            most_s = ANSWERED_AT_MOST_S if is_connecting else LOOK_AT_MOST_S
            in_vain = all_tried_since_s >= look.begun_s and not is_connecting
            if in_vain or now_s - look.begun_s >= most_s or self._has(look.name):
                look.over.set()
            else:
                going_on.append(look)
        self._looks = going_on

    def _hurry_one(self, missing: Sequence[ConnectAttempts], now_s: float) -> None:
        """Starts the attempt that is due and was tried longest ago."""
        apart_s = APART_S if any(look.is_known for look in self._looks) else UNKNOWN_APART_S
        before_s = min(now_s - apart_s, max(look.begun_s for look in self._looks))
        due = [attempts for attempts in missing if attempts.is_paused and attempts.begun_s <= before_s]
        if due:
            min(due, key=lambda attempts: attempts.begun_s).hurry()

    def _missing(self) -> list[ConnectAttempts]:
        """Returns the attempts that may bring a worker: lookups, and connections to workers that are missing."""
        missing = [
            link.connect_attempts
            for link in self._links()
            if link.worker is None and link.same_as is None and link.wanted
        ]
        return self.lookups + missing


@dataclass(frozen=True)
class Pool:
    """The workers of one model that accept requests, at least one. Immutable: a change makes another pool. State that
    changes with time alone is read from the workers for each request."""

    name: str
    workers: Sequence[ConnectedWorker]

    @cached_property
    def limits(self) -> GetModelResponse:
        """The model's description and limits, see limits_of()."""
        return limits_of([worker.model for worker in self.workers])

    @cached_property
    def tokenizer(self) -> PromptTokenizer:
        """A tokenizer with the chat template that most workers have. All of them encode alike."""
        rendering = most_common(worker.tokenizer.rendering for worker in self.workers)
        return next(worker.tokenizer for worker in self.workers if worker.tokenizer.rendering == rendering)

    def with_room(self, num_tokens: int) -> Sequence[ConnectedWorker]:
        """Returns the workers that can hold `num_tokens`, of prompt and output together."""
        if num_tokens <= self._least_tokens:
            return self.workers
        return [worker for worker in self.workers if num_tokens <= worker.most_tokens]

    def allowed(self, workers: Sequence[ConnectedWorker], now_s: float) -> Sequence[ConnectedWorker]:
        """Returns the workers whose breakers allow a request; all of them if none does, since any may have recovered.
        Raises RequestRefused (NO_WORKER) if `workers` is empty."""
        if not workers:
            raise no_worker(f"no worker is left for model {self.name}")
        if not self._has_open_breakers:
            return workers
        return [worker for worker in workers if worker.breaker.allows(now_s)] or workers

    @cached_property
    def _least_tokens(self) -> int:
        return min(worker.most_tokens for worker in self.workers)

    @cached_property
    def _has_open_breakers(self) -> bool:
        return not all(worker.breaker.is_closed for worker in self.workers)


class Pools:
    """All workers, by the name of the model they serve."""

    def __init__(self, rng: Random, policy: RoutingPolicy | None = None) -> None:
        self.links: list[WorkerLink] = []
        self.set_aside: dict[str, str] = {}  # leased addresses where no worker could be connected → the problem
        self.policy = policy or RoutingPolicy()
        self.index = PrefixIndex()
        self.hot_prefixes = HotPrefixes()
        self.search = PoolSearch(lambda: self.links, self._has)
        self.num_waiting = 0  # requests that wait until a worker can take them
        self._rng = rng
        self._change = asyncio.Event()
        self._models: dict[str, Pool] | None = None  # None after a change
        self._terms: dict[str, Terms] = {}  # by model: those that its workers last agreed on

    def change(self) -> asyncio.Event:
        """Returns an event that the next notify() sets. Get it before looking at the pools, then wait for it."""
        return self._change

    def notify(self) -> None:
        """To be called at once when a worker connects or is lost, starts or stops accepting requests, when its breaker
        opens or closes, or when a suspect leaves its cell."""
        self._models = None
        self._change.set()
        self._change = asyncio.Event()

    def models(self) -> Mapping[str, Pool]:
        """Returns the workers that accept requests, by model name."""
        if self._models is None:
            self._models = self._accepting()
            self._terms = {name: pool.workers[0].terms for name, pool in self._models.items()}
            self.search.served(self._models)
        return self._models

    def pool(self, name: str, allowed: Container[str] | None = None) -> Pool:
        """Returns the pool of a model; an empty name means the only model. Raises RequestRefused (MODEL_NOT_FOUND or
        NO_WORKER).

        allowed: models that the caller may use and be told of; None: all
        """
        models = self.models()
        if allowed is not None:
            models = {name: pool for name, pool in models.items() if name in allowed}
        if name in models:
            return models[name]
        if not name and len(models) == 1:
            return next(iter(models.values()))
        if not name and len(models) > 1:
            raise RequestRefused(
                CODE_NOT_FOUND, MODEL_NOT_FOUND, f"name a model: {', '.join(sorted(models))}", field="model"
            )
        if not models or self.search.knows(name):
            raise no_worker("no worker is ready" + (f" for model {name}" if name else ""))
        raise RequestRefused(
            CODE_NOT_FOUND, MODEL_NOT_FOUND, f"no model {name!r}; served: {', '.join(sorted(models))}", field="model"
        )

    async def found(
        self, name: str, tenant: str, time_left_s: float | None = None, allowed: Container[str] | None = None
    ) -> Pool:
        """As pool(), but searches for a worker before it raises: a worker may have started this moment."""
        with contextlib.suppress(RequestRefused):
            return self.pool(name, allowed)
        await self.search.look_for(name, tenant, time_left_s)
        return self.pool(name, allowed)

    async def found_models(self, tenant: str) -> Mapping[str, Pool]:
        """As models(), after a search for workers if there are none."""
        await self.search.look_for("", tenant)
        return self.models()

    def route(self, workers: Sequence[ConnectedWorker], request: RouteRequest) -> Route[ConnectedWorker]:
        """Chooses among `workers`, at least one, all of one model."""
        return route(self.index, workers, request, self.policy, self._rng)

    def explain(self, workers: Sequence[ConnectedWorker], request: RouteRequest) -> Route[ConnectedWorker]:
        """Returns what route() would return now, without changing what it returns later."""
        rng = Random()
        rng.setstate(self._rng.getstate())
        return route(self.index, workers, request, self.policy, rng)

    def check_integrity(self) -> None:
        """Asserts that the cached pools equal the pools as they would be built now."""
        for name, pool in (self._models or {}).items():
            now = self._accepting().get(name)
            assert now is not None, f"no worker of {name} accepts requests any more"
            assert now.workers == pool.workers, f"the workers of {name} are others"
            assert now._has_open_breakers == pool._has_open_breakers, f"breakers of {name} have opened or closed"
        assert self._models is None or self._models.keys() == self._accepting().keys(), "a model has come"

    def _accepting(self) -> dict[str, Pool]:
        accepting: dict[str, list[ConnectedWorker]] = {}
        for link in self.links:
            if (worker := link.worker) is not None and worker.accepts:
                accepting.setdefault(worker.model_name, []).append(worker)
        return {name: Pool(name, self._agreeing(name, workers)) for name, workers in accepting.items()}

    def _agreeing(self, name: str, workers: list[ConnectedWorker]) -> list[ConnectedWorker]:
        """Returns the workers whose terms agree, so that a request can go to any of them. Sets the others aside."""
        terms = [worker.terms for worker in workers]
        common = agreed(terms, self._terms.get(name))
        count = terms.count(common)
        for worker in workers:
            aside = deviation(worker.terms, common, count, len(workers))
            if aside and not worker.aside:
                get_logger().error("worker set aside", worker=worker.worker_id, address=worker.address, problem=aside)
            worker.aside = aside
        return [worker for worker in workers if not worker.aside]

    def _has(self, name: str) -> bool:
        """Whether the model has a ready worker; for an empty name, whether any model has."""
        models = self.models()
        return name in models if name else bool(models)
