"""InferenceService: a router's RPCs for clients."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, contextmanager, suppress
from functools import partial
from typing import Any

from opentelemetry.trace import Span, Status, StatusCode

from trunkline.grant import forbidden
from trunkline.grant_keys import GrantKeys
from trunkline.status import (
    CODE_INTERNAL,
    DEADLINE_EXCEEDED,
    INTERNAL,
    RequestRefused,
    invalid,
)
from trunkline.v1.inference_pb2 import (
    DetokenizeRequest,
    GenerateRequest,
    GenerateResponse,
    GrantRequest,
    GrantResponse,
    ListModelsRequest,
    ListModelsResponse,
    Model,
    TokenizeRequest,
)
from trunkline.v1.inference_pb2_grpc import InferenceServiceServicer
from trunkline.validation import max_total_tokens
from trunkline_router.api.grant_charge import GrantCharge
from trunkline_router.api.granting import Granter
from trunkline_router.dispatch.dispatch import Dispatcher
from trunkline_router.dispatch.running import Running
from trunkline_router.gate.request_size import MAX_DETOKENIZED_IDS
from trunkline_router.prompts.token_ids import detokenize_response, read_ids, tokenize_response
from trunkline_router.quotas.reservation import Reservation
from trunkline_router.request.call_charge import charged_call
from trunkline_router.request.prepare import Preparer
from trunkline_router.request.prepared_request import PreparedRequest
from trunkline_router.request.request_call import Context, RequestCall
from trunkline_router.request.steps import give_way
from trunkline_router.request.tenants import Tenants, tenant_of
from trunkline_router.shared_state.state import SharedState
from trunkline_runtime.log import get_logger
from trunkline_runtime.tracing import request_span, trace_context_of

FIRST_MESSAGE_S = 10.0  # a Grant call that sends nothing for this long is ended: otherwise it would stay open forever


class InferenceService(InferenceServiceServicer):
    """Serves clients' requests. A call that fails raises RequestRefused, which becomes the call's gRPC status."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        *,
        max_choices: int,
        shared: SharedState,
        tenants: Tenants | None = None,
        grant_keys: GrantKeys | None = None,
    ) -> None:
        self._dispatcher = dispatcher
        self._pools = dispatcher.pools
        self._shared = shared
        self._tenants = tenants or Tenants()
        self._preparer = Preparer(self._pools, shared, self._tenants, max_choices)
        self._running = Running()
        self._granter = Granter(dispatcher, grant_keys or GrantKeys(), lambda: int(time.time() * 1e3), self._running)

    async def stop_admission(self) -> None:
        """Refuses new requests from now on. Returns when the last running request has ended."""
        await self._running.stop()

    async def Generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateResponse, None]:
        call = RequestCall.of(request, context)
        with self._observed("router.generate", call) as span, self._running.admitted():
            prepared = await self._preparer.prepare(call)
            with await self._reserve(prepared) as reservation:
                async with aclosing(
                    self._dispatcher.dispatch(prepared, call.time_left, span, call.log_fields, reservation.meter)
                ) as responses:
                    reservation.follow(responses.stream)
                    async for response in responses:
                        reservation.took(response)
                        yield response

    async def Grant(
        self, request_iterator: AsyncIterator[GrantRequest], context: Context
    ) -> AsyncGenerator[GrantResponse, None]:
        first = None
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_MESSAGE_S):
                first = await anext(request_iterator, None)
        # Only now: if a call ends while its client is still writing, grpc.aio can hide the status from the client.
        self._granter.check_offered()
        if first is None or first.WhichOneof("news") != "request":
            raise invalid("request", f"must be in the first message, within {FIRST_MESSAGE_S:g} s")
        call = RequestCall.of(first.request, context)
        with self._observed("router.grant", call) as span, self._running.admitted():
            prepared = await self._preparer.prepare(call)
            self._granter.check_taken(prepared.model)
            self._check_reservable(prepared)
            reserve = partial(self._charge, prepared)
            async with aclosing(
                self._granter.answers(prepared, request_iterator, call.time_left, reserve, span, call.log_fields)
            ) as answers:
                async for answer in answers:
                    yield answer
            call.log_fields["outcome"] = "granted"  # the worker's log has the outcome of the answer

    @contextmanager
    def _observed(self, name: str, call: RequestCall) -> Iterator[Span]:
        """Opens the request's span and, when the request ends, writes its log line. An unexpected error becomes
        RequestRefused (INTERNAL)."""
        started_s = time.monotonic()
        traceparent, tracestate = trace_context_of(call.metadata)
        request_id, log_fields = call.request_id, call.log_fields
        log = get_logger().bind(request_id=request_id)
        log_fields["outcome"] = "cancelled"
        attributes = {"trunkline.request_id": request_id}
        with request_span(name, traceparent=traceparent, tracestate=tracestate, attributes=attributes) as span:
            try:
                yield span
            except RequestRefused as refused:
                log_fields["outcome"] = refused.reason
                span.set_status(Status(StatusCode.ERROR, refused.reason))
                if refused.reason == INTERNAL and request_id not in refused.message:  # a worker's
                    raise _internal(request_id) from None
                raise
            except Exception as error:
                log_fields["outcome"] = INTERNAL
                log.error("unexpected error", exc_info=error)
                raise _internal(request_id) from None
            except (asyncio.CancelledError, GeneratorExit):
                remaining_s = call.time_left()
                if remaining_s is not None and remaining_s <= 0:
                    log_fields["outcome"] = DEADLINE_EXCEEDED
                raise
            finally:
                if span.is_recording():
                    span.set_attributes({f"trunkline.{name}": value for name, value in log_fields.items()})
                log.info("request ended", duration_ms=round((time.monotonic() - started_s) * 1e3, 1), **log_fields)

    async def _reserve(self, prepared: PreparedRequest, *, in_full: bool = False) -> Reservation:
        """Reserves the request's tokens in its tenant's quotas; `in_full`: the most that it can use. Raises
        RequestRefused (QUOTA_EXCEEDED)."""
        sampling, tenant = prepared.sampling, prepared.scheduling.tenant
        most_tokens = prepared.most_output_tokens
        terms = self._tenants.terms(tenant)
        return await self._shared.reserve(
            tenant,
            terms.quotas,
            is_listed=self._tenants.lists(tenant),
            weight=terms.weight,
            prompt_tokens=len(prepared.prompt),
            max_tokens=most_tokens if in_full or sampling.HasField("max_tokens") else None,
            most_tokens=most_tokens,
            choices=prepared.choices,
        )

    def _check_reservable(self, prepared: PreparedRequest) -> None:
        """Raises RequestRefused (FORBIDDEN) if the most that the request can use is more than its tenant's quotas ever
        allow. Generate would serve such a request by an estimate."""
        quotas = self._tenants.terms(prepared.scheduling.tenant).quotas
        bound = None if quotas is None else quotas.largest_request()
        if bound is None or prepared.sampling.HasField("max_tokens"):
            return
        name, most_tokens = bound
        prompt_tokens = len(prepared.prompt)
        tokens = prompt_tokens + prepared.choices * prepared.most_output_tokens
        if prompt_tokens <= most_tokens < tokens:
            words = name.replace("_", " ")
            raise forbidden(
                f"without max_tokens the request may use {tokens} tokens, more than can ever be granted to its tenant: "
                f"{most_tokens} {words}"
            )

    async def _charge(self, prepared: PreparedRequest) -> GrantCharge:
        """Reserves the most that a granted request can use. Raises RequestRefused (QUOTA_EXCEEDED)."""
        reservation = await self._reserve(prepared, in_full=True)
        return GrantCharge(reservation, len(prepared.prompt), prepared.choices * prepared.most_output_tokens)

    async def Tokenize(self, request: TokenizeRequest, context: Context) -> Any:  # serialized
        tenant = tenant_of(context.invocation_metadata())
        pool = await self._pools.found(request.model, tenant, context.time_remaining())
        tokenizer = pool.tokenizer
        kind = request.WhichOneof("input")
        if kind is None:
            raise invalid("input", "one of text and chat must be set")
        weight = self._tenants.terms(tenant).weight
        if kind == "chat":
            chat = request.chat
            tokenizer.check_chat(chat)
            async with charged_call(self._shared, self._tenants, tenant):
                ids = await tokenizer.encode_chat(chat, tenant=tenant, weight=weight)
        else:
            text = request.text  # each access makes a copy
            await give_way(len(text))
            tokenizer.check_fits(text)
            await give_way(len(text))
            special_tokens = not request.omit_special_tokens
            async with charged_call(self._shared, self._tenants, tenant):
                ids = await tokenizer.encode(text, special_tokens=special_tokens, tenant=tenant, weight=weight)
        return await tokenize_response(ids)

    async def Detokenize(self, request: DetokenizeRequest, context: Context) -> Any:  # serialized
        tenant = tenant_of(context.invocation_metadata())
        pool = await self._pools.found(request.model, tenant, context.time_remaining())
        most = max(MAX_DETOKENIZED_IDS, max_total_tokens(pool.limits))
        if len(request.token_ids) > most:
            raise invalid("token_ids", f"{len(request.token_ids)} ids are more than the {most} that are detokenized")
        ids = await read_ids(request.token_ids, vocab_size=pool.limits.vocab_size, field="token_ids")
        keep_special, weight = request.keep_special_tokens, self._tenants.terms(tenant).weight
        async with charged_call(self._shared, self._tenants, tenant):
            text = await pool.tokenizer.decode(ids, keep_special=keep_special, tenant=tenant, weight=weight)
        return detokenize_response(text)

    async def ListModels(self, request: ListModelsRequest, context: Context) -> ListModelsResponse:
        models = []
        found = await self._pools.found_models(tenant_of(context.invocation_metadata()))
        for name, pool in sorted(found.items()):
            models.append(
                Model(
                    name=name,
                    context_length=pool.limits.context_length,
                    vocab_size=pool.limits.vocab_size,
                    has_chat_template=pool.tokenizer.has_chat_template,
                    ready_workers=len(pool.workers),
                )
            )
        return ListModelsResponse(models=models)


def _internal(request_id: str) -> RequestRefused:
    return RequestRefused(
        CODE_INTERNAL, INTERNAL, f"an internal error; the servers' logs have it under request {request_id}"
    )
