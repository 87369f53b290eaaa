"""The workers of each model, and what a request needs to know of its model."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from random import Random

from trunkline.status import CODE_NOT_FOUND, MODEL_NOT_FOUND, RequestRefused, no_worker
from trunkline.v1.worker_pb2 import GetModelResponse
from trunkline.validation import max_total_tokens
from trunkline_router.live import Live
from trunkline_router.prefix_index import PrefixIndex
from trunkline_router.route import Route, route
from trunkline_router.route_request import RouteRequest
from trunkline_router.routing_policy import RoutingPolicy
from trunkline_router.tries import Look, Tries
from trunkline_router.worker_link import WorkerLink


class Pools:
    """All workers, by the name of the model they serve."""

    def __init__(self, rng: Random, policy: RoutingPolicy | None = None) -> None:
        self.links: list[WorkerLink] = []
        self.lookups: list[Tries] = []  # of names that stand for workers
        self.policy = policy or RoutingPolicy()
        self.index = PrefixIndex()
        self._rng = rng
        self._change = asyncio.Event()
        self._look = Look(self.lookups, self._missing)
        self._look_for_new = Look(self.lookups, self._never_connected)
        self._known: set[str] = set()  # names seen at least once: NO_WORKER rather than MODEL_NOT_FOUND

    def change(self) -> asyncio.Event:
        """Set when a worker comes, goes, or loses its suspect: to be asked for before looking, then waited for."""
        return self._change

    def notify(self) -> None:
        """Something changed."""
        self._change.set()
        self._change = asyncio.Event()

    def models(self) -> dict[str, list[Live]]:
        """Workers that accept requests, by model name."""
        found: dict[str, list[Live]] = {}
        for link in self.links:
            if (live := link.live) is not None and live.accepts:
                found.setdefault(live.model_name, []).append(live)
        self._known.update(found)
        return found

    def workers(self, name: str) -> tuple[str, list[Live]]:
        """The model's name and its ready workers. An empty name means the only model. Raises RequestRefused."""
        models = self.models()
        if name in models:
            return name, models[name]
        if not name and len(models) == 1:
            return next(iter(models.items()))
        if not name and len(models) > 1:
            raise RequestRefused(
                CODE_NOT_FOUND, MODEL_NOT_FOUND, f"name a model: {', '.join(sorted(models))}", field="model"
            )
        if not models or self._is_known(name):
            raise no_worker("no worker is ready" + (f" for model {name}" if name else ""))
        raise RequestRefused(
            CODE_NOT_FOUND, MODEL_NOT_FOUND, f"no model {name!r}; served: {', '.join(sorted(models))}", field="model"
        )

    async def found(self, name: str, time_left_s: float | None = None) -> tuple[str, list[Live]]:
        """workers(), and where there is none, another look first: one that came this moment may not be known yet."""
        with contextlib.suppress(RequestRefused):
            return self.workers(name)
        await self.look_for(name, time_left_s)
        return self.workers(name)

    async def found_models(self) -> dict[str, list[Live]]:
        """models(), likewise."""
        await self.look_for("")
        return self.models()

    async def look_for(self, name: str, time_left_s: float | None = None) -> None:
        """Looks once more for workers of a model that has none; of an empty name, for any. Takes no more than half of
        the time left."""
        if not self._has(name):
            # A name that no worker had is at most one's that was never reached.
            look = self._look if not name or self._is_known(name) else self._look_for_new
            await look.until(lambda: self._has(name), self.change, time_left_s)

    def _has(self, name: str) -> bool:
        """Whether the model has a ready worker; of an empty name, whether any has."""
        models = self.models()
        return name in models if name else bool(models)

    def _is_known(self, name: str) -> bool:
        """Whether any worker has ever served it."""
        return name in self._known or any(link.model is not None and link.model.model == name for link in self.links)

    def _missing(self) -> list[Tries]:
        """To connect to those who could have joined meanwhile."""
        return [link.tries for link in self.links if link.live is None and link.same_as is None and link.wanted]

    def _never_connected(self) -> list[Tries]:
        return [link.tries for link in self.links if link.model is None and link.same_as is None and link.wanted]

    def route(
        self,
        name: str,
        request: RouteRequest,
        usable: Callable[[Live], bool],
        preferred: Callable[[Live], bool] = lambda live: True,
    ) -> Route[Live]:
        """Chooses among the model's workers that are `usable`, and `preferred` where any is. Raises RequestRefused."""
        return self._route(name, request, usable, preferred, self._rng)

    def explain(self, name: str, request: RouteRequest, usable: Callable[[Live], bool]) -> Route[Live]:
        """What route() would say now; what it says then is not changed by this. Raises RequestRefused."""
        rng = Random()
        rng.setstate(self._rng.getstate())
        return self._route(name, request, usable, lambda live: True, rng)

    def _route(
        self,
        name: str,
        request: RouteRequest,
        usable: Callable[[Live], bool],
        preferred: Callable[[Live], bool],
        rng: Random,
    ) -> Route[Live]:
        workers = [live for live in self.workers(name)[1] if usable(live)]
        if not workers:
            raise no_worker(f"no worker is left for model {name}")
        # Where all of them have failed of late, any may have recovered: better than refusing.
        workers = [live for live in workers if live.breaker.allows(request.now_s)] or workers
        workers = [live for live in workers if preferred(live)] or workers
        return route(self.index, workers, request, self.policy, rng)


def limits_of(workers: Sequence[Live]) -> GetModelResponse:
    """The model's description; limits that differ among its workers are those of the most capable one."""
    return max((live.model for live in workers), key=max_total_tokens)
