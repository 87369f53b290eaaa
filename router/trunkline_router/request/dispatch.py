"""Dispatches prepared requests to workers, and moves a request to another worker if its own fails."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import NoReturn

from trunkline.names import finish_name
from trunkline.v1.inference_pb2 import GenerateResponse
from trunkline_router.quotas.reservation import OutputMeter
from trunkline_router.record.request_record import COMPLETE, PLACEMENT, RequestRecord
from trunkline_router.request.attempt import WorkerAttempt, trace_of
from trunkline_router.request.placement import Dispatcher, Placement
from trunkline_router.request.request_call import PreparedRequest, TimeLeft
from trunkline_router.request.request_stream import BrokenOff, RequestStream
from trunkline_router.request.suspicion import GONE_WITHIN_S, Suspicion, quarantined
from trunkline_router.routing.route import Route
from trunkline_router.workers.connected_worker import ConnectedWorker
from trunkline_runtime.log import get_logger


class DispatchedRequest:
    """One request on its way. `stream` holds the output of its workers so far."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        prepared: PreparedRequest,
        time_left: TimeLeft,
        record: RequestRecord,
        meter: OutputMeter,
    ) -> None:
        self.stream = RequestStream(
            record, prepared.choices, prepared.prompt_info(), dispatcher.fanout, dispatcher.backlog, meter
        )
        self._dispatcher = dispatcher
        self._prepared = prepared
        self._record = record
        self._suspicion = suspicion = Suspicion()
        self._killed: list[ConnectedWorker] = []  # workers that reported a death in a step of it
        self._placement = Placement(
            dispatcher,
            prepared,
            time_left,
            self.stream.answer,
            record,
            is_suspect=lambda: suspicion.is_suspect,  # refers to no `self`, which would make a cycle
        )

    async def responses(self) -> AsyncGenerator[GenerateResponse, None]:
        """Yields the responses, and fills in the request's record. Raises RequestRefused."""
        stream, record = self.stream, self._record
        self._dispatcher.budget.on_request()
        record.stage = PLACEMENT
        try:
            while True:
                route = await self._placed()
                timeout_ns = self._placement.timeout_ns()
                attempt = WorkerAttempt(route, self._suspicion, record, stream.answer, self._dispatcher.clock_s)
                try:
                    with attempt:
                        self._submit(attempt, route.worker, timeout_ns)
                        noted = attempt.noted
                        while (response := await stream.take()) is not None:
                            noted.last_output_s = stream.handed_s
                            if noted.first_output_s is None:
                                attempt.started(stream.handed_s, stream.cached_tokens)
                            yield response
                        noted.ended = COMPLETE
                    break
                except BrokenOff as broken:
                    await self._note(route.worker, broken)
            reasons = [finish_name(ledger.finish_reason) for ledger in stream.answer.ledgers]
            record.outcome = ",".join(dict.fromkeys(reasons))
        finally:
            stream.close()
            record.cached_tokens, record.completion_tokens = stream.cached_tokens, stream.answer.completion_tokens
            record.longest_choice_tokens = max([ledger.num_tokens for ledger in stream.answer.ledgers])

    async def _placed(self) -> Route[ConnectedWorker]:
        """Returns a route to a worker that this request may go to. Raises RequestRefused."""
        self._check_quarantine()
        route = await self._placement.place()
        self._check_quarantine()  # another copy of the request may have been convicted meanwhile
        return route

    def _check_quarantine(self) -> None:
        """Raises RequestRefused (QUARANTINED)."""
        prepared, dispatcher = self._prepared, self._dispatcher
        dispatcher.quarantine.check(
            prepared.scheduling.tenant, prepared.model, prepared.prompt, prepared.sampling, dispatcher.clock_s()
        )

    def _submit(self, attempt: WorkerAttempt, worker: ConnectedWorker, timeout_ns: int | None) -> None:
        """Sends the unfinished choices to the worker."""
        stream, suspicion = self.stream, self._suspicion
        submits = self._prepared.submits(
            stream.answer.unfinished(),
            timeout_ns=timeout_ns,
            trace=trace_of(self._record, attempt.noted.span_id),
            previous_traceparent=attempt.previous_traceparent,
            prompt_known=stream.answer.prompt_known,
            suspect=suspicion.is_suspect,
        )
        if suspicion.is_suspect:
            suspicion.enter(self._dispatcher.cells.enter(worker))
        stream.begin(worker.model.worker_id, attempt)
        attempt.submit(submits, stream.put)

    async def _note(self, worker: ConnectedWorker, broken: BrokenOff) -> None:
        """An attempt broke off. Raises RequestRefused if it was the last one."""
        stream, refused = self.stream, broken.refused
        if broken.suspect:
            self._killed.append(worker)
            if self._suspicion.on_death(sole_suspect=broken.sole_suspect) and await self._are_gone():
                self._convict()
        self._placement.on_lost(worker, refused)
        if not stream.answer.has_output:
            problem = "trying another worker"
        else:
            problem = "continuing on another worker"
            stream.resumptions += 1
        noted = self._record.attempts[-1]
        get_logger().warning(problem, **self._record.log_fields(), problem=noted.problem,
                             tokens=stream.answer.completion_tokens, suspect=broken.suspect)  # fmt: skip

    async def _are_gone(self) -> bool:
        """Whether the workers that report being killed by the request are gone, after a short wait."""
        dispatcher, killed = self._dispatcher, self._killed[-2:]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GONE_WITHIN_S):
                while not all(worker.session.is_broken for worker in killed):
                    await dispatcher.pools.change().wait()
        alive = [worker.address for worker in killed if not worker.session.is_broken]
        if not alive:
            return True
        get_logger().error("workers report that a request killed them, but they are still connected",
                           **self._record.log_fields(), workers=sorted({worker.address for worker in killed}),
                           alive=alive)  # fmt: skip
        return False

    def _convict(self) -> NoReturn:
        """Quarantines the request in the whole fleet; or in this router, for a short time, if the workers have
        convicted too many of the tenant's requests. Raises RequestRefused (QUARANTINED)."""
        prepared, dispatcher = self._prepared, self._dispatcher
        tenant, now_s = prepared.scheduling.tenant, dispatcher.clock_s()
        workers = [worker.address for worker in self._killed[-2:]]
        is_believed = dispatcher.witnesses.believe(tenant, set(workers), now_s)
        convict = dispatcher.quarantine.convict if is_believed else dispatcher.quarantine.convict_briefly
        convict(tenant, prepared.model, prepared.prompt, prepared.sampling, now_s)
        get_logger().error("request quarantined", **self._record.log_fields(), workers=workers, everywhere=is_believed)
        raise quarantined()
