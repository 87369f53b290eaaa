"""InferenceService: what clients call."""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import grpc
from opentelemetry.trace import Span, Status, StatusCode

from trunkline.status import (
    CODE_INTERNAL,
    DEADLINE_EXCEEDED,
    INTERNAL,
    NO_WORKER,
    RequestRefused,
    deadline_exceeded,
    invalid,
    no_worker,
)
from trunkline.v1.generation_pb2 import FinishReason, Lane
from trunkline.v1.inference_pb2 import (
    DetokenizeRequest,
    DetokenizeResponse,
    GenerateRequest,
    GenerateResponse,
    ListModelsRequest,
    ListModelsResponse,
    Model,
    PromptInfo,
    TokenizeRequest,
    TokenizeResponse,
)
from trunkline.v1.inference_pb2_grpc import InferenceServiceServicer
from trunkline.validation import validate_token_ids
from trunkline_router.edge import Prepared, prepare, request_id_of
from trunkline_router.pool import Pools, Route, limits_of
from trunkline_router.request_stream import RequestStream
from trunkline_router.tenants import Tenants, tenant_of
from trunkline_router.worker_link import Live
from trunkline_runtime.log import get_logger
from trunkline_runtime.tracing import current_trace_context, request_span, trace_context_of

# A request whose worker is lost before its first output is sent to this many workers in all.
MAX_TRIES = 2

Context = grpc.aio.ServicerContext[Any, Any]


class InferenceService(InferenceServiceServicer):
    def __init__(self, pools: Pools, *, max_choices: int, tenants: Tenants | None = None) -> None:
        self._pools = pools
        self._tenants = tenants or Tenants()
        self._max_choices = max_choices
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._stopping = False

    async def stop_admission(self) -> None:
        """Refuses new requests from now on; returns when the last running one has ended."""
        self._stopping = True
        await self._idle.wait()

    @contextmanager
    def _admitted(self) -> Iterator[None]:
        """Counts a request while it runs. Raises RequestRefused where the router is about to stop."""
        if self._stopping:
            raise no_worker("this router is stopping; another one, or this one restarted, may serve you")
        self._running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def Generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateResponse, None]:
        started_s = time.monotonic()
        request_id = request_id_of(request)
        traceparent, tracestate = trace_context_of(context.invocation_metadata())
        log = get_logger().bind(request_id=request_id)
        facts: dict[str, Any] = {"outcome": "cancelled"}
        attributes = {"trunkline.request_id": request_id}
        with request_span(
            "router.generate", traceparent=traceparent, tracestate=tracestate, attributes=attributes
        ) as span:
            try:
                with self._admitted():
                    model, workers = self._pools.workers(request.model)
                    tenant = tenant_of(context.invocation_metadata())
                    prepared = await prepare(
                        request,
                        request_id,
                        model,
                        workers,
                        max_choices=self._max_choices,
                        tenant=tenant,
                        terms=self._tenants.terms(tenant),
                    )
                    facts |= {"model": model, "prompt_tokens": len(prepared.prompt), "choices": prepared.choices}
                    facts |= {"tenant": tenant, "lane": Lane.Name(prepared.lane).removeprefix("LANE_").lower()}
                    async with aclosing(self._generate(prepared, context, span, facts)) as responses:
                        async for response in responses:
                            yield response
            except RequestRefused as refused:
                facts["outcome"] = refused.reason
                span.set_status(Status(StatusCode.ERROR, refused.reason))
                raise
            except Exception as error:
                facts["outcome"] = INTERNAL
                log.error("unexpected error", exc_info=error)
                message = f"an internal error; the server's log has it under request {request_id}"
                raise RequestRefused(CODE_INTERNAL, INTERNAL, message) from None
            except (asyncio.CancelledError, GeneratorExit):
                remaining_s = context.time_remaining()
                if remaining_s is not None and remaining_s <= 0:
                    facts["outcome"] = DEADLINE_EXCEEDED
                raise
            finally:
                span.set_attributes({f"trunkline.{name}": value for name, value in facts.items()})
                log.info("request ended", duration_ms=round((time.monotonic() - started_s) * 1e3, 1), **facts)

    async def _generate(
        self, prepared: Prepared, context: Context, span: Span, facts: dict[str, Any]
    ) -> AsyncGenerator[GenerateResponse, None]:
        """Sends the request to a worker, and once more to another if that one is lost before any output."""
        tried: list[Live] = []
        while True:
            route = self._pools.route(
                prepared.model,
                prepared.prompt,
                b"",
                usable=lambda live: prepared.fits(live.model) and all(live is not other for other in tried),
            )
            _trace_route(span, route)
            facts["worker"] = route.live.model.worker_id
            tried.append(route.live)
            prompt = PromptInfo(
                model=prepared.model,
                worker_id=route.live.model.worker_id,
                prompt_tokens=len(prepared.prompt),
                seed=prepared.seed,
                lane=prepared.lane,
            )
            stream = RequestStream(prepared.request_id, prepared.choices, prompt)
            try:
                async with aclosing(_stream_from(route, prepared, stream, context)) as responses:
                    async for response in responses:
                        yield response
            except RequestRefused as refused:
                if refused.reason != NO_WORKER or stream.has_output or len(tried) >= MAX_TRIES:
                    raise
                get_logger().warning("trying another worker", request_id=prepared.request_id, problem=refused.message)
                continue
            facts["cached_tokens"] = stream.cached_tokens
            facts["completion_tokens"] = stream.completion_tokens
            reasons = [FinishReason.Name(reason) for _, reason in sorted(stream.finish_reasons.items())]
            facts["outcome"] = ",".join(dict.fromkeys(r.removeprefix("FINISH_REASON_").lower() for r in reasons))
            return

    async def Tokenize(self, request: TokenizeRequest, context: Context) -> TokenizeResponse:
        _, workers = self._pools.workers(request.model)
        tokenizer = workers[0].tokenizer
        kind = request.WhichOneof("input")
        if kind is None:
            raise invalid("input", "one of text and chat must be set")
        if kind == "chat":
            return TokenizeResponse(token_ids=await tokenizer.encode_chat(request.chat))
        ids = await tokenizer.encode(request.text, special_tokens=not request.omit_special_tokens)
        return TokenizeResponse(token_ids=ids)

    async def Detokenize(self, request: DetokenizeRequest, context: Context) -> DetokenizeResponse:
        _, workers = self._pools.workers(request.model)
        validate_token_ids(request.token_ids, vocab_size=limits_of(workers).vocab_size, field="token_ids")
        ids = list(request.token_ids)
        text = await workers[0].tokenizer.decode(ids, keep_special=request.keep_special_tokens)
        return DetokenizeResponse(text=text)

    async def ListModels(self, request: ListModelsRequest, context: Context) -> ListModelsResponse:
        models = []
        for name, workers in sorted(self._pools.models().items()):
            limits = limits_of(workers)
            models.append(
                Model(
                    name=name,
                    context_length=limits.context_length,
                    vocab_size=limits.vocab_size,
                    has_chat_template=workers[0].tokenizer.has_chat_template,
                    ready_workers=len(workers),
                )
            )
        return ListModelsResponse(models=models)


async def _stream_from(
    route: Route, prepared: Prepared, stream: RequestStream, context: Context
) -> AsyncGenerator[GenerateResponse, None]:
    """The request's responses from one worker. Whichever way this ends, the worker is told and the load is settled."""
    session = route.live.session
    remaining_s = context.time_remaining()
    if remaining_s is not None and remaining_s <= 0:
        raise deadline_exceeded()
    timeout_ns = None if remaining_s is None else int(remaining_s * 1e9)
    submits = prepared.submits(timeout_ns, current_trace_context())
    uncached = len(prepared.prompt) - route.plan.matched_tokens
    with route.live.in_flight(choices=prepared.choices, uncached_tokens=uncached, chain=route.chain) as flight:
        handles = session.submit(submits, [stream.put] * prepared.choices)
        try:
            while (response := await stream.take()) is not None:
                flight.has_started()
                yield response
        finally:
            session.abort(handles)


def _trace_route(span: Span, route: Route) -> None:
    """What was weighed."""
    span.set_attribute("trunkline.worker", route.live.model.worker_id)
    span.set_attribute("trunkline.route.matched_tokens", route.plan.matched_tokens)
    for candidate in route.plan.candidates:
        view = candidate.view
        span.add_event(
            "candidate",
            {
                "worker": view.worker_id,
                "matched_tokens": view.matched_tokens,
                "queued_tokens": view.queued_tokens,
                "running": view.running,
                "cost_tokens": candidate.cost_tokens,
            },
        )
