"""Predicts when a chosen worker returns a request's first token. Pure.

The policy compares workers by ttft.py, which counts a step under way as half done. What users and metrics are told is
more exact, because most first tokens take one step and the rest of the one before. So the worker's steps are followed
from its last message on: which of them the request will find under way, which prompts it computes, and when it ends.
"""

import math

from trunkline_router.routing.policy import RoutePlan
from trunkline_router.routing.route_request import RouteRequest
from trunkline_router.routing.ttft import FLOATS, StepCost, queued_before, work_before
from trunkline_router.routing.worker_state import WorkerState

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
    facts, begun_s = plan.workers.row(plan.chosen), worker.steps.begun_s
    if not facts.choices or begun_s is None or math.isnan(facts.fixed_s):
        return None
    cost = StepCost(*facts[:4])
    work = work_before(FLOATS, request, facts, cost)
    step_s, token_s = cost.fixed_s + work.decoding_s, cost.token_s + cost.pair_s * facts.queued_context
    prompts = iter(worker.prompts_sent())
    prompt = next(prompts, None)
    arrived = computed = 0.0  # tokens of these prompts
    for _ in range(MOST_STEPS):
        while prompt is not None and prompt.sent_s <= begun_s and arrived < computed + work.room:
            arrived += prompt.tokens
            prompt = next(prompts, None)
        chunk = min(arrived - computed, work.room)
        computed += chunk
        end_s = begun_s + step_s + (chunk * token_s if chunk else -worker.load.other_experts_s)
        if request.now_s < end_s - PLANNING_LEAD_S:
            break
        begun_s = end_s
    else:
        return None
    queued, matched = max(queued_before(request.lane, facts) - computed, 0.0), plan.matched_tokens
    uncached = len(request.prompt) - matched
    own_s = uncached * (cost.token_s + cost.pair_s * (matched + uncached / 2))
    steps_s = math.ceil((queued + uncached) / work.room) * step_s
    return end_s - request.now_s + queued * token_s + own_s + steps_s
