"""The workers of each model, and the limits and tokenizer of the model."""

import asyncio
import contextlib
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random

from trunkline.capabilities import NO_NEEDS, Capabilities, Needs, unable
from trunkline.status import CODE_NOT_FOUND, MODEL_NOT_FOUND, RequestRefused, no_worker
from trunkline.v1.worker_pb2 import GetModelResponse, Task
from trunkline_router.prompts.tokenizer import PromptTokenizer
from trunkline_router.routing.earlier_prompts import EarlierPrompts
from trunkline_router.routing.hot_prefixes import HotPrefixes
from trunkline_router.routing.prefix_index import PrefixIndex
from trunkline_router.routing.route import Route, route
from trunkline_router.routing.route_request import NotedPrompts, RouteRequest, RoutingPolicy
from trunkline_router.workers.connected_worker import ConnectedWorker
from trunkline_router.workers.pool_search import ConnectAttempts, PoolSearch
from trunkline_router.workers.pool_terms import Terms, deviation, limits_of, most_common
from trunkline_router.workers.worker_link import WorkerLink
from trunkline_runtime.log import get_logger


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

    @property
    def task(self) -> "Task.ValueType":
        """What the model is for. All workers agree on it."""
        return self.workers[0].terms.task

    def able(self, needs: Needs) -> "Pool | None":
        """Returns the pool of those workers that have these capabilities; None if there are none. Its limits are
        theirs."""
        if not needs:
            return self
        if needs not in self._able:
            workers = [worker for worker in self.workers if worker.capabilities.can(needs)]
            self._able[needs] = Pool(self.name, workers) if workers else None
        return self._able[needs]

    def with_room(self, num_tokens: int, answer_format: str = "") -> Sequence[ConnectedWorker]:
        """Returns the workers that can hold `num_tokens`, of prompt and output together.

        answer_format: in which the answer will be parsed; workers that do not name it would leave out its marks
        """
        workers = self._by_format.get(answer_format, ()) if answer_format else self.workers
        if num_tokens <= self._least_tokens:
            return workers
        return [worker for worker in workers if num_tokens <= worker.most_tokens]

    def allowed(self, workers: Sequence[ConnectedWorker], now_s: float) -> Sequence[ConnectedWorker]:
        """Returns the workers whose breakers allow a request; all of them if none does, since any may have recovered.
        Raises RequestRefused (NO_WORKER) if `workers` is empty."""
        if not workers:
            raise no_worker(f"no worker is left for model {self.name}")
        if not self._has_open_breakers:
            return workers
        return [worker for worker in workers if worker.breaker.allows(now_s)] or workers

    @cached_property
    def _able(self) -> "dict[Needs, Pool | None]":
        return {}

    @cached_property
    def _by_format(self) -> Mapping[str, Sequence[ConnectedWorker]]:
        found: dict[str, list[ConnectedWorker]] = {}
        for worker in self.workers:
            found.setdefault(worker.model.answer_format, []).append(worker)
        return found

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
        self.noted_prompts = NotedPrompts()
        self.hot_prefixes = HotPrefixes(self.noted_prompts)
        self.earlier_prompts = EarlierPrompts()
        self.lookups: list[ConnectAttempts] = []  # of names that stand for workers
        self.search = PoolSearch(self.missing, self._has)
        self.num_waiting = 0  # requests that wait until a worker can take them
        self._rng = rng
        self._change = asyncio.Event()
        self._models: dict[str, Pool] | None = None  # None after a change
        self._terms: dict[str, Terms] = {}  # by model: those that its workers last agreed on
        self._known: set[str] = set()  # models that workers have served

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
            self._known.update(self._models)
        return self._models

    def pool(self, name: str, allowed: Container[str] | None = None, *, needs: Needs = NO_NEEDS) -> Pool:
        """Returns the pool of a model, of those workers that have the capabilities `needs`; an empty name means the
        only model. Raises RequestRefused: MODEL_NOT_FOUND or NO_WORKER; INVALID_REQUEST if no known worker of the model
        has all the capabilities.

        allowed: models that the caller may use and be told of; None: all
        """
        pool = self._named(name, allowed)
        if (able := pool.able(needs)) is not None:
            return able
        models = [link.model for link in self.links if link.model is not None and link.model.model == pool.name]
        known = [Capabilities.of(model) for model in models]
        if any(capabilities.can(needs) for capabilities in known):
            raise no_worker(f"no worker of model {pool.name} that can do this is ready")
        missing = needs.difference(*(capabilities.supported for capabilities in known))
        raise unable(missing or needs, f"no worker of model {pool.name} has")

    def _named(self, name: str, allowed: Container[str] | None) -> Pool:
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
        if not models or self.knows(name):
            raise no_worker("no worker is ready" + (f" for model {name}" if name else ""))
        raise RequestRefused(
            CODE_NOT_FOUND, MODEL_NOT_FOUND, f"no model {name!r}; served: {', '.join(sorted(models))}", field="model"
        )

    async def found(
        self,
        name: str,
        tenant: str,
        time_left_s: float | None = None,
        allowed: Container[str] | None = None,
        *,
        needs: Needs = NO_NEEDS,
    ) -> Pool:
        """As pool(), but searches for a worker before it raises: a worker may have started this moment."""
        with contextlib.suppress(RequestRefused):
            return self.pool(name, allowed, needs=needs)
        await self.search.look_for(name, tenant, time_left_s, needs)
        return self.pool(name, allowed, needs=needs)

    async def found_models(self, tenant: str) -> Mapping[str, Pool]:
        """As models(), after a search for workers if there are none."""
        await self.search.look_for("", tenant)
        return self.models()

    def missing(self) -> list[ConnectAttempts]:
        """Returns the attempts that may bring a worker: lookups, and connections to workers that are missing."""
        missing = (link for link in self.links if link.worker is None and link.same_as is None and link.wanted)
        return self.lookups + [link.connect_attempts for link in missing]

    def route(self, workers: Sequence[ConnectedWorker], request: RouteRequest) -> Route[ConnectedWorker]:
        """Chooses among `workers`, at least one, all of one model."""
        return route(self.index, workers, request, self.policy, self._rng)

    def explain(self, workers: Sequence[ConnectedWorker], request: RouteRequest) -> Route[ConnectedWorker]:
        """Returns what route() would return now, without changing what it returns later."""
        rng = Random()
        rng.setstate(self._rng.getstate())
        return route(self.index, workers, request, self.policy, rng)

    def _accepting(self) -> dict[str, Pool]:
        accepting: dict[str, list[ConnectedWorker]] = {}
        for link in self.links:
            if (worker := link.worker) is not None and worker.accepts:
                accepting.setdefault(worker.model_name, []).append(worker)
        return {name: Pool(name, self._agreeing(name, workers)) for name, workers in accepting.items()}

    def _agreeing(self, name: str, workers: list[ConnectedWorker]) -> list[ConnectedWorker]:
        """Returns the workers whose terms agree, so that a request can go to any of them. Sets the others aside."""
        terms = [worker.terms for worker in workers]
        common = most_common(terms, self._terms.get(name))
        count = terms.count(common)
        for worker in workers:
            aside = deviation(worker.terms, common, count, len(workers))
            if aside and not worker.aside:
                get_logger().error("worker set aside", worker=worker.worker_id, address=worker.address, problem=aside)
            worker.aside = aside
        return [worker for worker in workers if not worker.aside]

    def _has(self, name: str, needs: Needs) -> bool:
        """Whether the model has a ready worker with these capabilities; for an empty name, whether any model has."""
        models = self.models()
        pools = models.values() if not name else [models[name]] if name in models else []
        return any(pool.able(needs) is not None for pool in pools)

    def knows(self, name: str) -> bool:
        """Whether any worker has ever served the model."""
        return name in self._known or any(link.model is not None and link.model.model == name for link in self.links)
