"""Predicts when a chosen worker returns a request's first token, or the last output of several inputs. Pure.

The policy compares workers by ttft.py, which counts a step under way as half done. What users and metrics are told is
more exact, because most first tokens take one step and the rest of the one before. So the worker's steps are followed
from its last message on: which of them the request will find under way, which prompts it computes, and when it ends.
"""

import math
from collections import deque
from collections.abc import Iterator

from trunkline_router.routing.policy import RoutePlan
from trunkline_router.routing.route_request import RouteRequest
from trunkline_router.routing.ttft import FLOATS, StepCost, queued_before, work_before
from trunkline_router.routing.worker_state import SentPrompt, WorkerState

# A worker plans its next step this long before the one under way ends. What arrives later waits for one more step.
PLANNING_LEAD_S = 0.5e-3
# Steps that are followed without a message. After more, it is not known how far the worker is.
MOST_STEPS = 8


def first_token_s(request: RouteRequest, worker: WorkerState, plan: RoutePlan) -> float | None:
    """Returns the time from the decision to the first token's arrival at the router; None if the policy predicts
    nothing. To be called before the request counts as sent."""
    if plan.prediction is None:
        return None
    terms = plan.prediction.terms_of(plan.chosen)
    at_worker_s = _followed_s(request, worker, plan)
    if at_worker_s is None:
        at_worker_s = terms.queue_s + terms.prefill_s + terms.decode_s
    return at_worker_s + terms.kv_wait_s + (worker.steps.delay_s or 0.0)


def _followed_s(request: RouteRequest, worker: WorkerState, plan: RoutePlan) -> float | None:
    """Returns the time from the request's arrival at the worker to the end of the step with its first token; None if no
    step is under way there, or it is not known which."""
    facts, steps = plan.workers.row(plan.chosen), worker.steps
    if not facts.choices or not steps.begun_s or math.isnan(facts.fixed_s):
        return None
    cost = StepCost(*facts[:4])
    work = work_before(FLOATS, request, facts, cost)
    step_s, begun_s = cost.fixed_s + work.decoding_s, steps.begun_s[-1]
    prompts = deque(worker.prompts_sent())
    if prompts:  # its worker has not computed it, however many steps have had a part of it
        computed = steps.num_ended(prompts[0].sent_s) * work.room
        prompts[0] = prompts[0]._replace(tokens=max(prompts[0].tokens - computed, 1.0))
    for _ in range(MOST_STEPS):
        chunks_s = sum([_time_s(chunk, cost) for chunk in _taken(prompts, begun_s, work.room)])
        end_s = begun_s + step_s + (chunks_s or -worker.load.other_experts_s)
        if request.now_s < end_s - PLANNING_LEAD_S:
            break
        begun_s = end_s
    else:
        return None
    uncached = len(request.prompt) - plan.matched_tokens
    own = SentPrompt(request.now_s, request.lane, uncached, plan.matched_tokens + uncached / 2)
    before = [prompt for prompt in prompts if prompt.lane <= request.lane]
    # What the worker has queued beyond all that this router sent is from other routers.
    others = max(queued_before(request.lane, facts) - worker.queued_tokens, 0.0)
    chunks = [*before, own, SentPrompt(request.now_s, request.lane, others, facts.queued_context)]
    if request.beside_tokens:
        context = request.beside_context
        chunks.append(SentPrompt(request.now_s, request.lane, request.beside_tokens, context))
    num_steps = math.ceil(sum([chunk.tokens for chunk in chunks]) / work.room)
    return end_s - request.now_s + num_steps * step_s + sum([_time_s(chunk, cost) for chunk in chunks])


def _taken(prompts: deque[SentPrompt], begun_s: float, room: float) -> Iterator[SentPrompt]:
    """Takes from the prompts, and yields, what a step computes of them that begins then."""
    while prompts and prompts[0].sent_s <= begun_s and room > 0:
        prompt = prompts.popleft()
        part = min(prompt.tokens, room)
        if part < prompt.tokens:
            prompts.appendleft(prompt._replace(tokens=prompt.tokens - part))
        room -= part
        yield prompt._replace(tokens=part)


def _time_s(chunk: SentPrompt, cost: StepCost[float]) -> float:
    """Returns the time that it adds to a step."""
    return chunk.tokens * (cost.token_s + cost.pair_s * chunk.context)
