"""The workers of each model, and what a request needs to know of its model."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random

from trunkline.status import CODE_NOT_FOUND, MODEL_NOT_FOUND, RequestRefused, no_worker
from trunkline.v1.worker_pb2 import GetModelResponse
from trunkline_router.claims.pool_terms import Terms, agreed, deviation, limits_of, most_common
from trunkline_router.prompts.tokenizer import PromptTokenizer
from trunkline_router.routing.prefix_index import PrefixIndex
from trunkline_router.routing.route import Route, route
from trunkline_router.routing.route_request import RouteRequest
from trunkline_router.routing.routing_policy import RoutingPolicy
from trunkline_router.workers.connected_worker import ConnectedWorker
from trunkline_router.workers.pool_search import PoolSearch
from trunkline_router.workers.worker_link import WorkerLink
from trunkline_runtime.log import get_logger


@dataclass(frozen=True)
class Pool:
    """The workers of one model that accept requests, at least one, until something changes. What changes with time
    alone is not in here: it is asked of them for each request."""

    name: str
    workers: Sequence[ConnectedWorker]

    @cached_property
    def limits(self) -> GetModelResponse:
        """The model's description, see limits_of()."""
        return limits_of([worker.model for worker in self.workers])

    @cached_property
    def tokenizer(self) -> PromptTokenizer:
        """All encode alike; of chat templates the one that most have."""
        rendering = most_common(worker.tokenizer.rendering for worker in self.workers)
        return next(worker.tokenizer for worker in self.workers if worker.tokenizer.rendering == rendering)

    def with_room(self, num_tokens: int) -> Sequence[ConnectedWorker]:
        """Those that take so many tokens, of prompt and output together."""
        if num_tokens <= self._least_tokens:
            return self.workers
        return [worker for worker in self.workers if num_tokens <= worker.most_tokens]

    def allowed(self, workers: Sequence[ConnectedWorker], now_s: float) -> Sequence[ConnectedWorker]:
        """Of these workers those that have not failed of late. Where all have, any may have recovered: all. Raises
        RequestRefused where there are none."""
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
        self.policy = policy or RoutingPolicy()
        self.index = PrefixIndex()
        self.search = PoolSearch(lambda: self.links, self._has)
        self._rng = rng
        self._change = asyncio.Event()
        self._models: dict[str, Pool] | None = None  # until something changes
        self._terms: dict[str, Terms] = {}  # by model: on which its workers agreed last

    def change(self) -> asyncio.Event:
        """Set when something changes, see notify(): to be asked for before looking, then waited for."""
        return self._change

    def notify(self) -> None:
        """A worker has come or gone, accepts requests or no longer does, its breaker has opened or closed, or it has
        lost its suspect. To be called before anything else runs."""
        self._models = None
        self._change.set()
        self._change = asyncio.Event()

    def models(self) -> Mapping[str, Pool]:
        """Workers that accept requests, by model name."""
        if self._models is None:
            self._models = self._accepting()
            self._terms = {name: pool.workers[0].terms for name, pool in self._models.items()}
            self.search.served(self._models)
        return self._models

    def pool(self, name: str) -> Pool:
        """The model's ready workers. An empty name means the only model. Raises RequestRefused."""
        models = self.models()
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

    async def found(self, name: str, tenant: str, time_left_s: float | None = None) -> Pool:
        """pool(), and where there is none, another look first: one that came this moment may not be known yet."""
        with contextlib.suppress(RequestRefused):
            return self.pool(name)
        await self.search.look_for(name, tenant, time_left_s)
        return self.pool(name)

    async def found_models(self, tenant: str) -> Mapping[str, Pool]:
        """models(), likewise."""
        await self.search.look_for("", tenant)
        return self.models()

    def route(self, workers: Sequence[ConnectedWorker], request: RouteRequest) -> Route[ConnectedWorker]:
        """Chooses among these of one model, at least one."""
        return route(self.index, workers, request, self.policy, self._rng)

    def explain(self, workers: Sequence[ConnectedWorker], request: RouteRequest) -> Route[ConnectedWorker]:
        """What route() would say now; what it says then is not changed by this."""
        rng = Random()
        rng.setstate(self._rng.getstate())
        return route(self.index, workers, request, self.policy, rng)

    def check_integrity(self) -> None:
        """That what is kept is what it would be if it were made now."""
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
        """Those on whose terms requests can go to any of them; the others are set aside."""
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
        """Whether the model has a ready worker; of an empty name, whether any has."""
        models = self.models()
        return name in models if name else bool(models)
