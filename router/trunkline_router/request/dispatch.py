"""Dispatches prepared requests to workers, and moves a request to another worker if its own fails."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from random import Random
from typing import NoReturn

from trunkline.ledger import AnswerLedger
from trunkline.names import finish_name
from trunkline.v1.inference_pb2 import GenerateResponse
from trunkline_router.quotas.meter import OutputMeter
from trunkline_router.record.request_record import COMPLETE, PLACEMENT, RequestRecord
from trunkline_router.request.attempt import (
    WorkerAttempt,
    begin_attempt,
    end_attempt,
    note_loss,
    trace_of,
)
from trunkline_router.request.client_buffer import Backlog
from trunkline_router.request.failover import FailoverLimits, Recovery, RetryBudget
from trunkline_router.request.placement import Placement
from trunkline_router.request.request_call import PreparedRequest, TimeLeft
from trunkline_router.request.request_stream import BrokenOff, Fanout, RequestStream
from trunkline_router.request.suspicion import GONE_WITHIN_S, Cells, Quarantine, Suspicion, Witnesses, quarantined
from trunkline_router.routing.route import Route
from trunkline_router.workers.connected_worker import ConnectedWorker
from trunkline_router.workers.pool import Pools
from trunkline_runtime.log import get_logger


class Dispatcher:
    """Dispatches requests: holds what all requests of one router have in common."""

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
        self.witnesses = Witnesses()
        self.fanout = Fanout(clock_s)
        self.backlog = backlog or Backlog()

    def dispatch(
        self, prepared: PreparedRequest, time_left: TimeLeft, record: RequestRecord, meter: OutputMeter
    ) -> "DispatchedRequest":
        """Returns the request's responses, from as many workers as it needs, and fills in its record. Iterating raises
        RequestRefused."""
        return DispatchedRequest(self, prepared, time_left, record, meter)

    def placement(
        self,
        prepared: PreparedRequest,
        time_left: TimeLeft,
        progress: AnswerLedger,
        record: RequestRecord,
        *,
        is_usable: Callable[[ConnectedWorker], bool] | None = None,
        is_suspect: Callable[[], bool] = lambda: False,
    ) -> Placement:
        """Returns the placement of one request."""
        return Placement(
            self.pools,
            self.budget,
            self.clock_s,
            self.rng,
            Recovery(self.limits),
            prepared,
            time_left,
            progress,
            self.cells,
            is_usable,
            is_suspect,
            record,
        )


@dataclass(slots=True)
class DispatchedRequest:
    """One request, iterated for its responses. Must be closed, however the iteration ends. `stream` holds the output of
    its workers so far."""

    dispatcher: Dispatcher
    prepared: PreparedRequest
    time_left: TimeLeft
    record: RequestRecord
    meter: OutputMeter
    suspicion: Suspicion = field(init=False)
    stream: RequestStream = field(init=False)
    placement: Placement = field(init=False)
    _killed: list[ConnectedWorker] = field(default_factory=list)  # workers that reported a death in a step of it
    _responses: AsyncGenerator[GenerateResponse, None] = field(init=False)

    def __post_init__(self) -> None:
        self.suspicion = suspicion = Suspicion()
        prepared, dispatcher = self.prepared, self.dispatcher
        self.stream = RequestStream(
            self.record,
            prepared.choices,
            prepared.prompt_info(),
            dispatcher.fanout,
            dispatcher.backlog,
            self.meter,
        )
        self.placement = self.dispatcher.placement(
            prepared,
            self.time_left,
            self.stream.answer,
            self.record,
            is_suspect=lambda: suspicion.is_suspect,  # refers to no `self`, which would make a cycle
        )
        self._responses = self.responses()

    def __aiter__(self) -> AsyncIterator[GenerateResponse]:
        return self._responses

    async def aclose(self) -> None:
        await self._responses.aclose()
        self.stream.close()
        self.record.cached_tokens = self.stream.cached_tokens
        self.record.completion_tokens = self.stream.answer.completion_tokens
        self.record.longest_choice_tokens = max(ledger.num_tokens for ledger in self.stream.answer.ledgers)

    async def responses(self) -> AsyncGenerator[GenerateResponse, None]:
        stream, dispatcher = self.stream, self.dispatcher
        dispatcher.budget.on_request()
        self.record.stage = PLACEMENT
        while True:
            self._check_quarantine()
            route = await self.placement.place()
            self._check_quarantine()  # another copy of the request may have been convicted meanwhile
            if self.suspicion.is_suspect:
                self.suspicion.enter(dispatcher.cells.enter(route.worker))
            try:
                async with aclosing(self._attempt(route)) as responses:
                    async for response in responses:
                        yield response
                break
            except BrokenOff as broken:
                await self._note(route.worker, broken)
            finally:
                self.suspicion.leave()
        reasons = [finish_name(ledger.finish_reason) for ledger in stream.answer.ledgers]
        self.record.outcome = ",".join(dict.fromkeys(reasons))

    def _check_quarantine(self) -> None:
        """Raises RequestRefused (QUARANTINED)."""
        prepared, dispatcher = self.prepared, self.dispatcher
        dispatcher.quarantine.check(
            prepared.scheduling.tenant, prepared.model, prepared.prompt, prepared.sampling, dispatcher.clock_s()
        )

    async def _attempt(self, route: Route[ConnectedWorker]) -> AsyncGenerator[GenerateResponse, None]:
        """Yields the responses from one worker. However this ends, the worker is told and its load is settled. Raises
        BrokenOff if the worker gives the request up."""
        worker, stream, prepared, dispatcher = route.worker, self.stream, self.prepared, self.dispatcher
        timeout_ns = self.placement.timeout_ns()
        noted, previous_traceparent = begin_attempt(self.record, worker, stream.answer)
        submits = prepared.submits(
            stream.answer.unfinished(),
            timeout_ns=timeout_ns,
            trace=trace_of(self.record, noted.span_id),
            previous_traceparent=previous_traceparent,
            prompt_known=stream.answer.prompt_known,
            suspect=self.suspicion.is_suspect,
        )
        is_told_cached = not stream.answer.prompt_known
        has_started = False
        trial = worker.breaker.dispatch()
        with route.in_flight() as flight:
            attempt = WorkerAttempt(worker, flight, self.suspicion, self.record, noted)
            stream.begin(worker.model.worker_id, attempt)
            attempt.handles += worker.session.submit(submits, [stream.put] * len(submits))
            try:
                while (response := await stream.take()) is not None:
                    if not has_started:
                        has_started = True
                        noted.first_output_s = stream.handed_s
                        flight.has_started(stream.cached_tokens if is_told_cached else None)
                        trial.succeeded(dispatcher.clock_s())
                    yield response
                noted.ended = COMPLETE
            except BrokenOff as broken:
                note_loss(noted, broken.refused)
                # The link counts a lost worker once, and a worker that drains or hangs has not failed.
                if worker.accepts and not worker.session.is_broken:
                    trial.refused(broken.refused.reason, dispatcher.clock_s())
                raise
            finally:
                trial.end()
                attempt.abort()
                end_attempt(noted, stream.handed_s if has_started else None)

    async def _note(self, worker: ConnectedWorker, broken: BrokenOff) -> None:
        """An attempt broke off. Raises RequestRefused if it was the last one."""
        stream, refused = self.stream, broken.refused
        if broken.suspect:
            self._killed.append(worker)
            if self.suspicion.on_death(sole_suspect=broken.sole_suspect) and await self._are_gone():
                self._convict()
        self.placement.on_lost(worker, refused)
        if not stream.answer.has_output:
            problem = "trying another worker"
        else:
            problem = "continuing on another worker"
            stream.resumptions += 1
        noted = self.record.attempts[-1]
        get_logger().warning(problem, **self.record.log_fields(), problem=noted.problem,
                             tokens=stream.answer.completion_tokens, suspect=broken.suspect)  # fmt: skip

    async def _are_gone(self) -> bool:
        """Whether the workers that report being killed by the request are gone, after a short wait."""
        dispatcher, killed = self.dispatcher, self._killed[-2:]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GONE_WITHIN_S):
                while not all(worker.session.is_broken for worker in killed):
                    await dispatcher.pools.change().wait()
        alive = [worker.address for worker in killed if not worker.session.is_broken]
        if not alive:
            return True
        get_logger().error("workers report that a request killed them, but they are still connected",
                           **self.record.log_fields(), workers=sorted({worker.address for worker in killed}),
                           alive=alive)  # fmt: skip
        return False

    def _convict(self) -> NoReturn:
        """Quarantines the request in the whole fleet; or in this router, for a short time, if the workers have
        convicted too many of the tenant's requests. Raises RequestRefused (QUARANTINED)."""
        prepared, dispatcher = self.prepared, self.dispatcher
        tenant, now_s = prepared.scheduling.tenant, dispatcher.clock_s()
        workers = [worker.address for worker in self._killed[-2:]]
        is_believed = dispatcher.witnesses.believe(tenant, set(workers), now_s)
        convict = dispatcher.quarantine.convict if is_believed else dispatcher.quarantine.convict_briefly
        convict(tenant, prepared.model, prepared.prompt, prepared.sampling, now_s)
        get_logger().error("request quarantined", **self.record.log_fields(), workers=workers, everywhere=is_believed)
        raise quarantined()
