"""What a router does for its clients, over any protocol: generate, tokenize, detokenize, list models."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Iterable, Mapping, Sequence
from contextlib import aclosing
from contextvars import Token
from types import TracebackType
from typing import TypeVar

from trunkline.status import INTERNAL, RequestRefused, deadline_exceeded, internal, invalid, no_worker
from trunkline.v1.inference_pb2 import GenerateResponse, TokenizeRequest
from trunkline.validation import check_length, max_total_tokens
from trunkline_router.access.access import Caller
from trunkline_router.prompts.reasoning_effort import DEFAULT_LIMITS, effort_limits
from trunkline_router.prompts.token_ids import read_ids
from trunkline_router.quotas.admission import RequestUse
from trunkline_router.quotas.reservation import Reservation
from trunkline_router.quotas.shared_state import SharedState
from trunkline_router.record.request_observer import RequestObserver, note_refusal
from trunkline_router.record.request_record import QUOTAS, Interval, RequestRecord
from trunkline_router.request.answer_counts import count_reasoning, end_of, note_calls
from trunkline_router.request.dispatch import DispatchedRequest
from trunkline_router.request.placement import Dispatcher
from trunkline_router.request.prepare import ModelAliases, Preparer
from trunkline_router.request.request_call import PreparedRequest, RequestCall
from trunkline_router.workers.pool import Pool
from trunkline_runtime.log import LogContext, get_logger
from trunkline_runtime.telemetry.trace_context import trace_context_of

MAX_DETOKENIZED_IDS = 1 << 18  # or the length of the longest context, if that is more


class Inference:
    """Serves clients' requests. A request that fails raises RequestRefused."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        *,
        max_choices: int,
        shared: SharedState,
        observer: RequestObserver | None = None,
        aliases: ModelAliases | None = None,
        enforces_calls: bool = False,
        reasoning_efforts: Sequence[str] = DEFAULT_LIMITS,
    ) -> None:
        self.observer = observer or RequestObserver()
        self.dispatcher = dispatcher
        self.pools = dispatcher.pools
        self.shared = shared
        aliases, limits = aliases or ModelAliases(), effort_limits(reasoning_efforts)
        self.preparer = Preparer(self.pools, shared, max_choices, aliases, limits, enforces_calls)
        self.running = Running()

    async def generate(self, call: RequestCall) -> AsyncGenerator[GenerateResponse, None]:
        """Yields the responses to a request: the first one has its prompt, the last one its usage."""
        sees_cache = call.caller.identity.sees_cache
        record = call.record
        if call.extras.work is not None:
            record.output = call.extras.work.output
        with ObservedCall(self.observer, call), self.running:
            prepared = await self.prepare(call)
            with await self.reserve(call.caller, prepared, record) as reservation:
                if call.extras.on_admission is not None:
                    await call.extras.on_admission(prepared)
                dispatched = DispatchedRequest(self.dispatcher, prepared, call.time_left, record, reservation.meter)
                reservation.follow(dispatched.stream)
                parsers, answer = dispatched.parsers, dispatched.stream.answer
                try:
                    async with aclosing(dispatched.responses()) as responses:
                        async for response in responses:
                            if response.HasField("prompt") and not prepared.inputs:  # inputs are metered
                                reservation.count_prompt(response.prompt)
                            if not sees_cache:
                                without_cache(response)
                            if parsers is not None and not answer.num_unfinished and response.HasField("usage"):
                                if any(parsers.reasoning):
                                    end = end_of(response)
                                    yield response
                                    response = end
                                    await count_reasoning(parsers, prepared, record, response.usage)
                                else:
                                    record.reasoning_tokens = response.usage.reasoning_tokens = 0
                            yield response
                finally:
                    note_calls(parsers, record)

    async def prepare(self, call: RequestCall) -> PreparedRequest:
        """Prepares a request, unless its tenant's quotas are known to be used up: to tokenize a prompt costs more than
        to refuse it. Raises RequestRefused."""
        caller, call.record.stage = call.caller, QUOTAS
        self.shared.check_left(caller.tenant, caller.terms.quotas, is_listed=caller.is_listed)
        return await self.preparer.prepare(call)

    async def check_lengths(self, model: str, caller: Caller, lengths: Iterable[int]) -> None:
        """Refuses prompts of so many tokens as prepare() would, before a token is looked at. Raises RequestRefused: as
        Preparer.pool(), and CONTEXT_LENGTH_EXCEEDED."""
        limits = (await self.preparer.pool(model, caller, None)).limits
        for num_prompt in lengths:
            check_length(num_prompt, None, context_length=limits.context_length, capacity=limits.kv_token_capacity)

    async def reserve(
        self, caller: Caller, prepared: PreparedRequest, record: RequestRecord, *, in_full: bool = False
    ) -> Reservation:
        """Reserves the request's tokens in its tenant's quotas; `in_full`: the most that it can use. Raises
        RequestRefused (QUOTA_EXCEEDED)."""
        sampling = prepared.sampling
        most_tokens = prepared.most_output_tokens
        record.stage = QUOTAS
        begun_s = time.monotonic()
        try:
            return await self.shared.reserve(
                caller.tenant,
                caller.terms.quotas,
                RequestUse(
                    prepared.prompt_tokens,
                    most_tokens if in_full or sampling.HasField("max_tokens") else None,
                    most_tokens=most_tokens,
                    choices=prepared.choices,
                ),
                weight=caller.terms.weight,
                is_listed=caller.is_listed,
            )
        finally:
            record.admitted = Interval(begun_s, time.monotonic())

    async def tokenize(self, request: TokenizeRequest, caller: Caller, time_left_s: float | None) -> Sequence[int]:
        """Returns the token ids of a text or conversation. Raises RequestRefused."""
        pool = await self.preparer.pool(request.model, caller, time_left_s)
        tokenizer = pool.tokenizer
        kind = request.WhichOneof("input")
        if kind is None:
            raise invalid("input", "one of text and chat must be set")
        tenant = caller.tenant
        if kind == "chat":
            chat = request.chat
            tokenizer.check_chat(chat)
            await charge_call(self.shared, caller)
            return await tokenizer.encode_chat(chat, tenant=tenant)
        text = request.text  # each access makes a copy
        tokenizer.check_fits(text)
        special_tokens = not request.omit_special_tokens
        await charge_call(self.shared, caller)
        return await tokenizer.encode(text, special_tokens=special_tokens, tenant=tenant)

    async def detokenize(
        self,
        model: str,
        token_ids: Sequence[int],
        caller: Caller,
        time_left_s: float | None,
        *,
        keep_special: bool = False,
    ) -> bytes:
        """Returns the text of token ids, in UTF-8. Raises RequestRefused."""
        pool = await self.detokenizing_pool(model, len(token_ids), caller, time_left_s)
        ids = await read_ids(token_ids, vocab_size=pool.limits.vocab_size, field="token_ids")
        await charge_call(self.shared, caller)
        return await pool.tokenizer.decode(ids, keep_special=keep_special, tenant=caller.tenant)

    async def detokenizing_pool(
        self, model: str, num_ids: int, caller: Caller, time_left_s: float | None = None
    ) -> Pool:
        """Returns the pool that detokenizes so many ids. Raises RequestRefused: as Preparer.pool(), and INVALID_REQUEST
        if they are too many."""
        pool = await self.preparer.pool(model, caller, time_left_s)
        most = max(MAX_DETOKENIZED_IDS, max_total_tokens(pool.limits))
        if num_ids > most:
            raise invalid("token_ids", f"{num_ids} ids are more than the {most} that are detokenized")
        return pool

    async def models(self, caller: Caller) -> Mapping[str, Pool]:
        """Returns the models with a ready worker that the caller may use, by name."""
        found = await self.pools.found_models(caller.tenant)
        allowed = caller.identity.models
        return {name: pool for name, pool in sorted(found.items()) if allowed is None or name in allowed}


async def whole_outputs(
    responses: AsyncGenerator[GenerateResponse, None],
) -> AsyncGenerator[GenerateResponse, None]:
    """Yields the responses to a request for vectors or scores. Raises RequestRefused if one of these was cancelled at
    its worker: an answer must not look whole without it."""
    async with aclosing(responses):
        async for response in responses:
            if response.WhichOneof("output") is None:
                raise no_worker("the request was cancelled at its worker")
            yield response


def without_cache(response: GenerateResponse) -> GenerateResponse:
    """Takes out of a response what tells the state of caches: the worker, and the cached tokens. Returns it."""
    if response.HasField("prompt"):
        response.prompt.ClearField("worker_id")
        response.prompt.ClearField("cached_tokens")
    if response.HasField("usage"):
        response.usage.ClearField("cached_tokens")
    return response


class ObservedCall:
    """A context that keeps the request's record until it closes. An unexpected error becomes RequestRefused (INTERNAL).

    A class, not a generator: it is entered for each request, and costs a third.
    """

    __slots__ = ("_begun", "_call", "_observer")

    def __init__(self, observer: RequestObserver, call: RequestCall) -> None:
        self._observer = observer
        self._call = call
        self._begun: Token[LogContext | None] | None = None

    def __enter__(self) -> None:
        call = self._call
        call.record.tenant = call.caller.tenant
        self._begun = self._observer.begin(call.record, *trace_context_of(call.metadata))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._begun is not None
        try:
            if error is not None:
                self._note(error)
        finally:
            self._observer.end(self._call.record, self._begun)

    def _note(self, error: BaseException) -> None:
        """Notes why the request ended. Raises RequestRefused in place of an error that clients must not see."""
        record, request_id = self._call.record, self._call.request_id
        if isinstance(error, RequestRefused):
            note_refusal(record, error)
            if error.reason == INTERNAL and request_id not in error.message:  # a worker's
                raise internal(request_id) from None
        elif isinstance(error, asyncio.CancelledError | GeneratorExit):
            remaining_s = self._call.time_left()
            if remaining_s is not None and remaining_s <= 0:
                note_refusal(record, deadline_exceeded())
        elif isinstance(error, Exception):
            get_logger().error("unexpected error", **record.log_fields(), exc_info=error)
            hidden = internal(request_id)
            note_refusal(record, hidden)
            raise hidden from None


T = TypeVar("T")


class Running:
    """Counts the running requests, which a router waits for before it stops: a context counts one. Entering it raises
    RequestRefused if the router is stopping. At a stop, waits that do not need the router end once no request needs it.
    """

    def __init__(self) -> None:
        self.num_running = 0  # requests that have begun and not ended
        self.is_stopping = False  # whether new requests are refused
        self._needing = 0  # requests that need this router
        self._unneeded: set[asyncio.Timeout] = set()  # the waits of the others
        self._idle = asyncio.Event()
        self._idle.set()

    async def stop(self) -> None:
        """Refuses new requests from now on. Returns when the last running request has ended."""
        self.is_stopping = True
        self._review()
        await self._idle.wait()

    def __enter__(self) -> None:
        if self.is_stopping:
            raise no_worker("this router is stopping; another one, or this one restarted, may serve you")
        self.num_running += 1
        self._needing += 1
        self._idle.clear()

    def __exit__(self, *_: object) -> None:
        self.num_running -= 1
        self._needing -= 1
        self._review()

    async def unneeded(self, coming: Awaitable[T]) -> T | None:
        """Waits for the next event of a running request that does not need the router until then. Returns None if the
        router stops first."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None) as wait:
                self._needing -= 1
                self._unneeded.add(wait)
                self._review()
                try:
                    return await coming
                finally:
                    self._needing += 1
                    self._unneeded.discard(wait)
        return None

    def _review(self) -> None:
        if self.is_stopping and not self._needing:
            waits, self._unneeded = self._unneeded, set()
            for wait in waits:
                wait.reschedule(asyncio.get_running_loop().time())
        if not self.num_running:
            self._idle.set()


def check_call(shared: SharedState, caller: Caller) -> None:
    """Raises RequestRefused (QUOTA_EXCEEDED) if charge_call() would, as far as this router alone knows. For calls that
    make work before they are charged."""
    shared.check_left(caller.tenant, caller.terms.quotas, tokens=0, is_listed=caller.is_listed)


async def charge_call(shared: SharedState, caller: Caller) -> None:
    """Counts one request of the caller's tenant, for a call that generates nothing, whatever becomes of it. Raises
    RequestRefused (QUOTA_EXCEEDED)."""
    terms = caller.terms
    if terms.quotas.requests_per_minute is None:
        return
    reservation = await shared.reserve(
        caller.tenant,
        terms.quotas,
        RequestUse(prompt_tokens=0, max_tokens=0, most_tokens=0, choices=1),
        weight=terms.weight,
        is_listed=caller.is_listed,
    )
    reservation.charge_in_full(0, 0)
    reservation.settle()
