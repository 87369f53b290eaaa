"""A prepared request at the workers: which one computes it, and what happens where that one cannot."""

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

from opentelemetry.trace import Span

from trunkline.status import NO_WORKER, OVERLOADED, RequestRefused, deadline_exceeded
from trunkline.v1.generation_pb2 import FinishReason
from trunkline.v1.inference_pb2 import GenerateResponse, PromptInfo
from trunkline_router.edge import Prepared
from trunkline_router.pool import Pools
from trunkline_router.request_stream import RequestStream
from trunkline_router.route import Route
from trunkline_router.worker_link import Live
from trunkline_runtime.log import get_logger
from trunkline_runtime.tracing import current_trace_context

# A request whose worker is lost before its first output is sent to this many workers in all.
MAX_TRIES = 2
# This many workers may turn a request away because they are full. It costs them little, but where all are full every
# request would ask every worker, at the worst time.
MAX_FULL = 4
# Candidates in a request's trace: the chosen one and those that came next.
MOST_TRACED = 8

TimeLeft = Callable[[], float | None]  # seconds until the request's deadline; None: it has none


async def dispatch(
    pools: Pools, prepared: Prepared, time_left: TimeLeft, span: Span, facts: dict[str, Any]
) -> AsyncGenerator[GenerateResponse, None]:
    """The request's responses. Until a worker has said anything of its output, another one may take it over.

    `facts` are filled in for the request's log line. Raises RequestRefused.
    """
    tried: list[Live] = []
    refusals: list[RequestRefused] = []
    while True:
        try:
            route = pools.route(
                prepared.model,
                prepared.route_request(time.monotonic()),
                usable=lambda live: prepared.fits(live.model) and all(live is not other for other in tried),
            )
        except RequestRefused as refused:
            raise (last_word(refusals) if refusals else refused) from None
        tried.append(route.worker)
        facts["worker"] = route.worker.model.worker_id
        _trace_route(span, route)
        stream = RequestStream(prepared.request_id, prepared.choices, _prompt_info(prepared, route))
        try:
            async with aclosing(_responses_of(route, prepared, stream, time_left, facts)) as responses:
                async for response in responses:
                    yield response
        except RequestRefused as refused:
            if stream.has_output or refused.reason not in (NO_WORKER, OVERLOADED):
                raise
            refusals.append(refused)
            if not may_try_again(refusals):
                raise last_word(refusals) from None
            get_logger().warning("trying another worker", request_id=prepared.request_id, problem=refused.message)
            continue
        facts["cached_tokens"] = stream.cached_tokens
        facts["completion_tokens"] = stream.completion_tokens
        reasons = [FinishReason.Name(reason) for _, reason in sorted(stream.finish_reasons.items())]
        facts["outcome"] = ",".join(dict.fromkeys(r.removeprefix("FINISH_REASON_").lower() for r in reasons))
        return


def may_try_again(refusals: Sequence[RequestRefused]) -> bool:
    """Whether a request that these workers did not answer is worth another one's time."""
    full = sum(refused.reason == OVERLOADED for refused in refusals)
    return full < MAX_FULL and len(refusals) - full < MAX_TRIES


def last_word(refusals: Sequence[RequestRefused]) -> RequestRefused:
    """What a client is told of several workers' refusals: full ones will have room, the first one soonest."""
    full = [refused for refused in refusals if refused.reason == OVERLOADED]
    if not full:
        return refusals[-1]
    return min(full, key=lambda refused: refused.retry_delay_ms or float("inf"))


async def _responses_of(
    route: Route[Live], prepared: Prepared, stream: RequestStream, time_left: TimeLeft, facts: dict[str, Any]
) -> AsyncGenerator[GenerateResponse, None]:
    """The request's responses from one worker. Whichever way this ends, the worker is told and the load is settled."""
    session = route.worker.session
    left_s = time_left()
    if left_s is not None and left_s <= 0:
        raise deadline_exceeded()
    timeout_ns = None if left_s is None else int(left_s * 1e9)
    submits = prepared.submits(timeout_ns, current_trace_context())
    with route.in_flight() as flight:
        handles: list[int] = []

        def let_go() -> None:
            # This generator stands still until the client reads on; should it never do so, nothing waits for that.
            session.abort(handles)
            flight.end()
            facts["outcome"] = OVERLOADED

        stream.on_overflow = let_go
        handles += session.submit(submits, [stream.put] * prepared.choices)
        try:
            while (response := await stream.take()) is not None:
                flight.has_started(stream.cached_tokens)
                yield response
        finally:
            session.abort(handles)


def _prompt_info(prepared: Prepared, route: Route[Live]) -> PromptInfo:
    return PromptInfo(
        model=prepared.model,
        worker_id=route.worker.model.worker_id,
        prompt_tokens=len(prepared.prompt),
        seed=prepared.seed,
        lane=prepared.scheduling.lane,
    )


def _trace_route(span: Span, route: Route[Live]) -> None:
    """What was weighed, and why it came out so."""
    if not span.is_recording():
        return
    plan = route.plan
    span.set_attributes(
        {
            "trunkline.worker": plan.worker_id,
            "trunkline.route.policy": plan.policy,
            "trunkline.route.reason": plan.reason,
            "trunkline.route.matched_tokens": plan.matched_tokens,
            "trunkline.route.candidates": len(plan.workers.worker_ids),
        }
    )
    for candidate in plan.best(MOST_TRACED):
        span.add_event("candidate", asdict(candidate))
