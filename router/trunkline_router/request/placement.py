"""Chooses the worker for a request and, after a failure, the next one; waits while no worker can take it.

Generate and Grant both use it.
"""

import asyncio
import contextlib
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from trunkline.ledger import AnswerLedger
from trunkline.status import OVERLOADED, RequestRefused, deadline_exceeded
from trunkline_router.record.request_record import PLACEMENT, Interval, PlacementRecord, RequestRecord
from trunkline_router.request.client_buffer import Backlog
from trunkline_router.request.failover import (
    MAX_JITTER_S,
    Cells,
    FailoverLimits,
    Quarantine,
    Recovery,
    RetryBudget,
    Suspicion,
)
from trunkline_router.request.request_call import PreparedRequest, TimeLeft
from trunkline_router.request.request_stream import Fanout
from trunkline_router.routing.earlier_prompts import Prospect
from trunkline_router.routing.route import Route
from trunkline_router.workers.connected_worker import ConnectedWorker
from trunkline_router.workers.pool import Pool, Pools

FULL_FOR_MS = 500  # retry delay after a full worker that gives none


class Dispatcher:
    """What all requests of one router have in common."""

    def __init__(
        self,
        pools: Pools,
        clock_s: Callable[[], float],
        rng: Random,
        *,
        limits: FailoverLimits | None = None,
        quarantine: Quarantine | None = None,
        backlog: Backlog | None = None,
    ) -> None:
        self.pools = pools
        self.clock_s = clock_s
        self.rng = rng
        self.limits = limits or FailoverLimits()
        self.quarantine = quarantine or Quarantine()
        self.budget = RetryBudget(clock_s())
        self.cells = Cells(on_free=pools.notify)
        self.fanout = Fanout(clock_s)
        self.backlog = backlog or Backlog()


@dataclass(slots=True)
class Placement:
    """The placement of one request.

    is_usable: a further condition on workers. suspicion: while the request is a suspect, it waits for a worker without
    another one; else it only prefers such workers.
    """

    dispatcher: Dispatcher
    prepared: PreparedRequest
    time_left: TimeLeft
    progress: AnswerLedger
    record: RequestRecord
    is_usable: Callable[[ConnectedWorker], bool] | None = None
    suspicion: Suspicion | None = None
    recovery: Recovery = field(init=False)
    _failed: dict[ConnectedWorker, int] = field(default_factory=dict)  # workers that lost it → `comebacks` then
    _full: dict[ConnectedWorker, float] = field(default_factory=dict)  # full workers → until when they are left out
    _is_queueing: bool = False  # waits for a cell that another suspect occupies
    _has_looked: bool = False  # a search for workers has failed since the last placement
    _fingerprint: str = ""  # of the weights that have begun the answer
    _prospect: Prospect | None = None  # of the prompt, until a worker has computed it

    def __post_init__(self) -> None:
        self.recovery = Recovery(self.dispatcher.limits)

    async def place(self) -> Route[ConnectedWorker]:
        """Returns a route to a worker, as soon as one can take the request, and notes it. Raises RequestRefused."""
        begun_s, plan, predicted_s, self.record.stage = time.monotonic(), None, None, PLACEMENT
        try:
            route = await self._placed()
            plan, predicted_s = route.plan, route.first_token_s()
            return route
        finally:
            self.record.note_placement(PlacementRecord(Interval(begun_s, time.monotonic()), plan, predicted_s))

    async def _placed(self) -> Route[ConnectedWorker]:
        dispatcher, progress = self.dispatcher, self.progress
        pools = dispatcher.pools
        if self.recovery.lost_last and not progress.has_output:
            delay_s = dispatcher.budget.take(dispatcher.clock_s())
            if delay_s is None:
                raise self.recovery.last_word()
            await asyncio.sleep(self._within_deadline(delay_s + dispatcher.rng.uniform(0, MAX_JITTER_S)))
        while True:
            changed = pools.change()
            self._is_queueing = False
            now_s = dispatcher.clock_s()
            try:
                workers = self._workers(pools.pool(self.prepared.model, needs=self.prepared.needs), now_s)
                route = pools.route(workers, self.prepared.route_request(now_s, progress.longest_output()))
                break
            except RequestRefused as refused:
                if not self._has_looked:
                    self._has_looked = True
                    prepared = self.prepared
                    tenant, needs = prepared.scheduling.tenant, prepared.needs
                    await pools.search.look_for(prepared.model, tenant, self.time_left(), needs)
                    continue
                if self._is_queueing:
                    self.recovery.stop_waiting()  # its turn will come; the limit is for workers that do not come
                    wait_s = float("inf")
                else:
                    wait_s = self.recovery.wait_s(now_s, refused, has_output=progress.has_output)
            wait_s = min([wait_s, *(until_s - now_s for until_s in self._full.values() if until_s > now_s)])
            wait_s = self._within_deadline(wait_s)
            pools.num_waiting += 1
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(None if wait_s == float("inf") else wait_s):
                        await changed.wait()
            finally:
                pools.num_waiting -= 1
        self._has_looked = False
        if not progress.has_output:
            self._fingerprint = route.worker.model.fingerprint
            tenant, block_size = self.prepared.scheduling.tenant, route.worker.model.block_size
            keys = array("Q", route.chain)
            pools.noted_prompts.note(tenant, block_size, keys)
            self._prospect = pools.earlier_prompts.prospect(keys, route)
        return route

    def timeout_ns(self) -> int | None:
        """Returns the time left to the request; None: it has no deadline. Raises RequestRefused if none is left."""
        left_s = self._within_deadline(float("inf"))
        return None if left_s == float("inf") else int(left_s * 1e9)

    def has_computed(self, cached_tokens: int) -> None:
        """The worker has computed the prompt, but for the tokens that it had in its cache."""
        prospect, record = self._prospect, self.record
        if prospect is None:
            return
        self._prospect = None
        if (miss := prospect.miss(cached_tokens, has_answers=record.has_answers)) is not None:
            record.cache_miss, record.seen_tokens = miss, prospect.seen
        self.dispatcher.pools.earlier_prompts.add(prospect)

    def on_lost(self, worker: ConnectedWorker, refused: RequestRefused) -> None:
        """The worker ended the attempt before the answer was complete. Raises RequestRefused if no other may follow."""
        progress = self.progress
        self.recovery.on_refusal(
            refused,
            progress=progress.progress,
            has_output=progress.has_output,
            can_resume=progress.can_resume,
            handed_over=worker.load.draining,
        )
        if refused.reason == OVERLOADED:
            self._full[worker] = self.dispatcher.clock_s() + (refused.retry_delay_ms or FULL_FOR_MS) / 1e3
        else:
            self._failed[worker] = worker.comebacks

    def _workers(self, pool: Pool, now_s: float) -> Sequence[ConnectedWorker]:
        """Returns the workers to choose among, at least one. Most requests rule out no worker, and so loop over none.
        Raises RequestRefused."""
        prepared = self.prepared
        workers = pool.with_room(prepared.least_room(self.progress.num_output), prepared.answer_format)
        if self._failed:
            workers = [worker for worker in workers if self._failed.get(worker) != worker.comebacks]
        if self._full:
            workers = [worker for worker in workers if self._full.get(worker, 0.0) <= now_s]
        if self.progress.has_output:
            workers = [worker for worker in workers if worker.model.fingerprint == self._fingerprint]
        if self.is_usable is not None:
            workers = [worker for worker in workers if self.is_usable(worker)]
        if self.suspicion is not None and self.suspicion.is_suspect:
            free = self.dispatcher.cells.free_of(workers)
            self._is_queueing = len(free) < len(workers)
            workers = free
        workers = pool.allowed(workers, now_s)
        return self.dispatcher.cells.free_of(workers) or workers

    def _within_deadline(self, wait_s: float) -> float:
        """Returns the wait, cut to the deadline. Raises RequestRefused if the deadline has passed."""
        left_s = self.time_left()
        if left_s is None:
            return wait_s
        if left_s <= 0:
            raise deadline_exceeded()
        return min(wait_s, left_s)
