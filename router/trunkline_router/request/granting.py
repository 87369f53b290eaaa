"""The direct path: the router chooses a worker and signs a grant, the client streams from the worker.

What a client reports affects its own request alone. It opens no breaker, counts in no worker's accuracy and raises no
suspicion, because a client could report anything of a healthy worker. The number of grants for a request is bounded.
"""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from trunkline.channel import MAX_MESSAGE_BYTES
from trunkline.grant import LIFETIME_S, GrantKeys, sign_grant
from trunkline.ledger import AnswerLedger, Ledger
from trunkline.status import CODE_RESOURCE_EXHAUSTED, OVERLOADED, RequestRefused, forbidden, invalid, no_worker
from trunkline.v1.inference_pb2 import ChoiceLedger, DirectLost, GrantRequest, GrantResponse
from trunkline.validation import validate_token_ids
from trunkline_router.record.request_record import GRANTED, AttemptRecord, RequestRecord
from trunkline_router.request.dispatch import begin_attempt, trace_of
from trunkline_router.request.grant_charge import GrantCharge
from trunkline_router.request.inference import Running
from trunkline_router.request.placement import Dispatcher, Placement
from trunkline_router.request.request_call import PreparedRequest, TimeLeft
from trunkline_router.request.request_stream import MAX_LEDGER_BYTES
from trunkline_router.routing.route import Route
from trunkline_router.routing.worker_state import InFlight
from trunkline_router.workers.connected_worker import ConnectedWorker
from trunkline_router.workers.health import Silence
from trunkline_runtime.log import get_logger

# For one request. Failover bounds the retries after lost workers, but not those after full ones.
MAX_GRANTS = 64
# A grant holds the prompt once for each choice, so a small request could ask for a large response. The first response
# leaves room in a message for ledgers; all responses to a request together have at most eight times its size.
MAX_FIRST_BYTES = MAX_MESSAGE_BYTES // 2
MAX_ALL_BYTES = 8 * MAX_FIRST_BYTES
LEAST_COME_BACK_MS, MOST_COME_BACK_MS = 10, 60_000  # bounds on the retry delay that a client says a full worker gave
REPORT_WAIT_S = 0.5  # for the worker's report on a request that its client says was lost
MID_ANSWER_WAIT_S = 15.0  # for that report in the middle of an answer, or for the router to see that the worker hangs
LOST = "the client has lost the worker that computed its request"
FULL = "the worker has no room"


Reserve = Callable[[], Awaitable[GrantCharge]]  # reserves quota for a request; raises RequestRefused


class Granter:
    """Answers Grant calls: what the granted requests of one router have in common.

    keys: sign the grants; none if this router gives none. now_unix_ms: the clock for the expiry of grants
    """

    def __init__(
        self, dispatcher: Dispatcher, keys: GrantKeys, now_unix_ms: Callable[[], int], running: Running
    ) -> None:
        self.dispatcher = dispatcher
        self.keys = keys
        self.now_unix_ms = now_unix_ms
        self.running = running

    def check_offered(self) -> None:
        """Raises RequestRefused (FORBIDDEN) if this router gives no grants."""
        if not self.keys:
            raise forbidden("this router gives no grants: it was started without --grant-key")

    def takes_grants(self, worker: ConnectedWorker) -> bool:
        """Whether the worker accepts this router's grants and reports on them."""
        return bool(self.keys.of_worker(worker.model)) and not worker.session.is_broken

    def check_taken(self, prepared: PreparedRequest) -> None:
        """Raises RequestRefused (FORBIDDEN) if no worker that can compute the request accepts this router's grants."""
        model, pools = prepared.model, self.dispatcher.pools
        if not any(self.takes_grants(worker) for worker in pools.pool(model, needs=prepared.needs).workers):
            raise forbidden(f"no worker of model {model} takes this router's grants: start both with one --grant-key")

    def answers(
        self,
        prepared: PreparedRequest,
        messages: AsyncIterator[GrantRequest],
        time_left: TimeLeft,
        reserve: Reserve,
        record: RequestRecord,
    ) -> AsyncGenerator[GrantResponse, None]:
        """Yields grants until the client ends its side: the first ones, and others whenever it needs another worker.
        Raises RequestRefused."""
        client_answer = ClientAnswer(prepared)
        placement = Placement(
            self.dispatcher, prepared, time_left, client_answer.answer, record, is_usable=self.takes_grants
        )
        return _Granting(self, prepared, client_answer, placement, messages, reserve, record).answers()


class ClientAnswer:
    """The part of its answer that a client says it has, checked for consistency."""

    def __init__(self, prepared: PreparedRequest) -> None:
        self._most_tokens = prepared.most_output_tokens
        self._vocab_size = prepared.vocab_size
        self.answer = AnswerLedger(prepared.choices, MAX_LEDGER_BYTES)

    def take(self, lost: DirectLost) -> None:
        """Takes the client's ledgers, which must not shrink. Raises RequestRefused (INVALID_REQUEST)."""
        answer = self.answer
        for claimed in lost.ledgers:
            choice, output = claimed.choice, claimed.output
            if choice >= len(answer.ledgers):
                raise invalid("ledgers.choice", f"{choice} is not in [0, {len(answer.ledgers)})")
            self._check(claimed, answer.ledgers[choice])
            answer.claim(choice, output.output_token_ids, output.text_bytes_sent, finished=claimed.finished)
        answer.prompt_known |= lost.prompt_known
        if not answer.num_unfinished:
            raise invalid("ledgers", "every choice is finished: there is nothing to continue")

    def _check(self, claimed: ChoiceLedger, known: Ledger) -> None:
        token_ids = claimed.output.output_token_ids
        if known.finished and not claimed.finished:
            raise invalid("ledgers.finished", f"choice {claimed.choice} had ended before")
        if len(token_ids) > self._most_tokens:
            raise invalid("ledgers.output", f"{len(token_ids)} tokens are more than the {self._most_tokens} possible")
        if not claimed.finished and len(token_ids) < known.num_tokens:
            raise invalid("ledgers.output", f"{len(token_ids)} tokens, after {known.num_tokens} before")
        validate_token_ids(token_ids, vocab_size=self._vocab_size, field="ledgers.output.output_token_ids")


@dataclass(slots=True)
class _Granting:
    """One Grant call."""

    granter: Granter
    prepared: PreparedRequest
    client_answer: ClientAnswer
    placement: Placement
    messages: AsyncIterator[GrantRequest]
    reserve: Reserve
    record: RequestRecord
    grants: int = 0
    granted_bytes: int = 0
    has_lost: bool = False  # the client says that it lost a worker
    is_streaming: bool = False  # the client says that its present worker streams

    async def answers(self) -> AsyncGenerator[GrantResponse, None]:
        prepared, dispatcher = self.prepared, self.granter.dispatcher
        now_s = dispatcher.clock_s()
        dispatcher.quarantine.check(prepared.computation, now_s)
        dispatcher.budget.on_request()
        charge = await self.reserve()
        try:
            while True:
                route = await self.placement.place()
                worker = route.worker
                silence = Silence(worker.watched_s, num_messages=worker.num_messages)
                noted, previous = begin_attempt(self.record, worker, self.client_answer.answer)
                with route.in_flight(is_granted=True) as flight, granted(noted):
                    yield self._grants(route, charge, flight, noted.span_id, previous)
                    while (lost := await self._next(flight)) is not None:
                        silent_s = silence.lasts_s(worker.watched_s, num_messages=worker.num_messages)
                        is_left = worker.is_hung or silent_s >= worker.may_be_silent_s
                        if is_left or lost.WhichOneof("news") == "lost":
                            break
                        # The worker serves other requests, or may be in a long step: this request waits for its turn.
                        yield GrantResponse(request_id=prepared.request_id, wait=True)
                if lost is None:
                    return
                self._take(worker, lost)
                charge = await self._account(worker, charge)
        finally:
            charge.let_go()

    async def _account(self, worker: ConnectedWorker, charge: GrantCharge) -> GrantCharge:
        """Returns the charge for the next grants. If only the client says that it needs another worker, the previous
        one may still compute the request: the tenant pays for both. Raises RequestRefused."""
        within_s = REPORT_WAIT_S if charge.is_limited else 0.0
        if await charge.is_excused(within_s, hangs=worker.is_hung):
            return charge
        try:
            further = await self.reserve()
        except RequestRefused:
            if not self.client_answer.answer.has_output:
                raise
            # In mid-answer the report is worth a wait: the link to a lost worker can take a while to break.
            is_excused = await charge.is_excused(MID_ANSWER_WAIT_S, hangs=False)
            if not is_excused and not await charge.is_excused(0.0, hangs=worker.is_hung):
                raise
            return charge
        charge.let_go()
        return further

    async def _next(self, flight: InFlight) -> GrantRequest | None:
        """Returns the client's next message that needs an answer; None once there is none. Raises RequestRefused."""
        while (message := await self._message()) is not None:
            kind = message.WhichOneof("news")
            if kind == "started":
                self.is_streaming = True
                flight.has_started()
            elif kind in ("lost", "silent"):
                return message
            elif kind == "request":
                raise invalid("request", "is for the first message; a call is for one request")
            else:
                raise invalid("news", "one of started, lost and silent must be set")
        return None

    async def _message(self) -> GrantRequest | None:
        """Returns the next message; None if the client ends its side, or the router stops while the client streams."""
        coming = anext(self.messages, None)
        return await (self.granter.running.unneeded(coming) if self.is_streaming else coming)

    def _grants(
        self, route: Route[ConnectedWorker], charge: GrantCharge, flight: InFlight, span_id: int, previous: str
    ) -> GrantResponse:
        """Returns the grants for this worker, signed. Raises RequestRefused.

        span_id: of the attempt. previous: traceparent of the one before, "" if there is none
        """
        granter, prepared, worker, client_answer = self.granter, self.prepared, route.worker, self.client_answer
        timeout_ns = self.placement.timeout_ns()
        submits = prepared.submits(
            client_answer.answer.unfinished(),
            timeout_ns=timeout_ns,
            trace=trace_of(self.record, span_id),
            previous_traceparent=previous,
            prompt_known=client_answer.answer.prompt_known,
            # Convicts no request. But if this one killed the worker, no other request in its step is convicted for it.
            suspect=self.has_lost,
        )
        charge.grant(worker.session, submits, on_over=flight.end)
        expires_unix_ms = granter.now_unix_ms() + int(LIFETIME_S * 1e3)
        key, epoch = granter.keys.of_worker(worker.model), worker.model.epoch
        response = GrantResponse(
            request_id=prepared.request_id,
            worker_address=worker.address,
            grants=[sign_grant(key, one, epoch=epoch, expires_unix_ms=expires_unix_ms) for one in submits],
            prompt=prepared.prompt_info(),
        )
        num_bytes = response.ByteSize()
        if not self.grants and num_bytes > MAX_FIRST_BYTES:
            charge.revoke()
            raise forbidden(f"too long to be granted: prompt and choices make {num_bytes} bytes")
        self.granted_bytes += num_bytes
        response.prompt.worker_id = worker.model.worker_id
        self.grants += 1
        self.is_streaming = False
        self.record.grants = self.grants
        return response

    def _take(self, worker: ConnectedWorker, message: GrantRequest) -> None:
        """The client wants to continue on another worker. Raises RequestRefused if it may not."""
        kind = message.WhichOneof("news")
        lost = message.lost if kind == "lost" else message.silent
        self.client_answer.take(lost)
        refused = no_worker(LOST)
        if kind == "lost" and lost.refusal.reason == OVERLOADED:
            delay_ms = min(max(lost.refusal.retry_delay_ms, LEAST_COME_BACK_MS), MOST_COME_BACK_MS)
            refused = RequestRefused(CODE_RESOURCE_EXHAUSTED, OVERLOADED, FULL, retry_delay_ms=delay_ms)
        self.has_lost |= refused.reason != OVERLOADED
        self.placement.on_lost(worker, refused)
        if self.grants >= MAX_GRANTS or self.granted_bytes > MAX_ALL_BYTES:
            raise refused
        problem = "granting another worker"
        noted = self.record.attempts[-1]
        noted.ended, noted.problem = refused.reason, kind or ""
        get_logger().warning(problem, **self.record.log_fields(), problem=noted.problem,
                             tokens=self.client_answer.answer.completion_tokens)  # fmt: skip


@contextmanager
def granted(noted: AttemptRecord) -> Iterator[None]:
    """Notes the end of a grant's use, as far as this router is told of it."""
    try:
        yield
        noted.ended = GRANTED
    finally:
        noted.ended_s = time.monotonic()
