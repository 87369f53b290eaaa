"""Predicts how soon each worker would give a request its first token. Pure; all workers at once.

A prompt is computed in chunks, one per step, after the prompts that are queued before it, and every step also computes
the running decodes. Workers measure and report the cost of their steps. A worker that has not reported it is assumed to
be like the others.
"""

import math
from collections.abc import Sequence
from statistics import median
from typing import Any, Generic, NamedTuple, Protocol

import numpy as np

from trunkline_router.routing.route_request import INTERACTIVE, RouteRequest
from trunkline_router.routing.worker_facts import Column, Number, WorkerFacts, WorkerTable

# For a fleet without reported step costs: costs count in tokens, and a decode slows a step by about 16 of them.
# fixed_s, token_s, kv_token_s, pair_s
DEFAULT_STEP_COST = (1e-3, 1e-4, 1e-4 / 64, 0.0)
# A worker gives the chunks in a step at least this share of the time of its decodes, however long that is.
LEAST_ADDED_SHARE = 0.25
# Estimated tokens that a running choice still has to generate: after this many steps its blocks are free.
REMAINING_TOKENS = 256
# While a smaller share of the pool is live, requests wait for their turn only, not for blocks.
FORESEEN_SHARE = 0.5
# Above this share of live blocks, more choices soon lead to preemptions. The penalty grows with the square of the
# excess; for a full pool it is the time to recompute the prompt, or a running choice's context if that is longer.
ROOMY_SHARE = 0.8
MOST_CROWDED = 2.0  # in multiples of the range from ROOMY_SHARE to a full pool
# Computing a prefix that another worker holds delays all other requests at a worker until its queue is empty again.
# This share of that time counts for each choice there, so that a busy fleet does not compute prefixes twice to save one
# request a little, and become busier still. If even the shortest queue is long, only computing less helps: the share
# counts once more for each SHORT_QUEUE_S of it. Without this, a fleet that was once overloaded stays overloaded at
# loads that it carries easily (bench/log.md).
OTHERS_SHARE = 0.05
SHORT_QUEUE_S = 0.01
LEAST_KV_WAIT_S = 1e-3  # a shorter wait for blocks is not told
LEAST_START_SHARE = 0.01  # of a fresh worker: it counts as at most a hundred times slower
# Up to this many workers are weighed one by one: numpy takes as long for one as for fifty.
FEW_WORKERS = 6


class Terms(NamedTuple, Generic[Number]):
    """Parts of the predicted time, in seconds: of one worker, or of all workers."""

    queue_s: Number
    prefill_s: Number
    decode_s: Number
    kv_wait_s: Number
    kv_penalty_s: Number
    slow_start_s: Number
    others_s: Number


class Prediction(NamedTuple):
    """Predicted times, by worker."""

    terms: Sequence[Terms[float]] | Terms[Column]
    cost_s: Sequence[float] | Column
    block_s: Sequence[float] | Column  # time to compute one block of a prompt

    def terms_of(self, place: int) -> Terms[float]:
        """Returns one worker's terms."""
        terms = self.terms
        return Terms(*(float(column[place]) for column in terms)) if isinstance(terms, Terms) else terms[place]

    def waits_for_kv(self, place: int) -> bool:
        """Whether most of the wait at a worker is for KV blocks. `kv_wait_s` is for a place among the running choices,
        too; the penalty says that the blocks are scarce."""
        terms = self.terms_of(place)
        return terms.kv_penalty_s > 0.0 and terms.kv_wait_s > max(terms.queue_s, LEAST_KV_WAIT_S)


def predict(request: RouteRequest, workers: WorkerTable, draw: float) -> Prediction:
    """Predicts the time of each worker.

    draw: a random number in [0, 1). A worker whose slow-start share is at most this counts as slower for this request,
    so that it competes at full speed for that share of requests
    """
    if len(workers.worker_ids) <= FEW_WORKERS:
        return _predict_few(request, workers, draw)
    facts, matched = workers.columns, np.asarray(workers.matched_tokens, np.float64)
    cost = _step_costs(facts)
    work = work_before(_COLUMNS, request, facts, cost)
    freshest = np.maximum(facts.slow_start_share, LEAST_START_SHARE).max()
    fleet = _Fleet(float(matched.max()), float(work.queue_s.min()), float(freshest), draw)
    terms = _terms(_COLUMNS, request, facts, matched, cost, work, fleet)
    return Prediction(terms, _cost_s(terms), facts.block_size * cost.token_s)


def _predict_few(request: RouteRequest, workers: WorkerTable, draw: float) -> Prediction:
    """As predict(), in plain Python: faster for a few workers."""
    rows, matched = workers.rows, [float(tokens) for tokens in workers.matched_tokens]
    costs = _step_costs_of(rows)
    works = [work_before(FLOATS, request, facts, cost) for facts, cost in zip(rows, costs, strict=True)]
    freshest = max(LEAST_START_SHARE, *(facts.slow_start_share for facts in rows))
    fleet = _Fleet(max(matched), min(work.queue_s for work in works), freshest, draw)
    terms = [_terms(FLOATS, request, *each, fleet) for each in zip(rows, matched, costs, works, strict=True)]
    block_s = [facts.block_size * cost.token_s for facts, cost in zip(rows, costs, strict=True)]
    return Prediction(terms, [_cost_s(each) for each in terms], block_s)


class StepCost(NamedTuple, Generic[Number]):
    """See StepCostModel."""

    fixed_s: Number
    token_s: Number
    kv_token_s: Number
    pair_s: Number


class Work(NamedTuple, Generic[Number]):
    """The work before a request at a worker."""

    decoding_s: Number  # per step
    room: Number  # prompt tokens in a step
    queue_steps: Number
    queue_s: Number


class _Fleet(NamedTuple):
    """The fleet's values that a worker is compared with."""

    most_matched: float
    shortest_queue_s: float
    freshest_share: float
    draw: float


class _Arithmetic(Protocol[Number]):
    """The functions that the formulas need in addition to operators."""

    def minimum(self, a: Number, b: Number | float, /) -> Number: ...
    def maximum(self, a: Number, b: Number | float, /) -> Number: ...
    def ceil(self, a: Number, /) -> Number: ...


class _Floats:
    minimum, maximum, ceil = staticmethod(min), staticmethod(max), staticmethod(math.ceil)


FLOATS: _Arithmetic[float] = _Floats()
_COLUMNS: Any = np  # an _Arithmetic[Column]


def work_before(
    of: _Arithmetic[Number], request: RouteRequest, facts: WorkerFacts[Number], cost: StepCost[Number]
) -> Work[Number]:
    decodes = of.minimum(facts.choices, facts.most_running)
    decoding_s = cost.token_s * decodes + cost.kv_token_s * facts.decode_kv_tokens
    room = (facts.step_tokens if request.lane == INTERACTIVE else facts.lower_step_tokens) - decodes
    before_s = cost.fixed_s + decoding_s
    chunk_s = of.maximum(facts.step_target_s - before_s, LEAST_ADDED_SHARE * before_s)
    room = of.maximum(of.minimum(room, chunk_s / of.maximum(cost.token_s, 1e-9)), 1.0)
    queued = queued_before(request.lane, facts)
    queue_steps = queued / room
    queue_s = queued * (cost.token_s + cost.pair_s * facts.queued_context) + queue_steps * cost.fixed_s
    return Work(decoding_s, room, queue_steps, queue_s)


def _terms(
    of: _Arithmetic[Number],
    request: RouteRequest,
    facts: WorkerFacts[Number],
    matched: Number,
    cost: StepCost[Number],
    work: Work[Number],
    fleet: _Fleet,
) -> Terms[Number]:
    fixed_s, token_s, _, pair_s = cost
    decoding_s, room, queue_steps, queue_s = work
    choices, queued = facts.choices, queued_before(request.lane, facts)
    own, beside = len(request.prompt) - matched, request.beside_tokens
    uncached = own + beside
    own_steps = of.ceil(uncached / room)
    prefill_s = own * (token_s + pair_s * (matched + own / 2)) + own_steps * fixed_s
    if beside:
        prefill_s += beside * (token_s + pair_s * request.beside_context)
    # Half a step, because one is under way if anything runs.
    decode_s = (own_steps + queue_steps) * decoding_s + 0.5 * (decoding_s + fixed_s) * (choices > 0)

    wanted_blocks = (of.minimum(queued, facts.waiting_tokens) + uncached) / facts.block_size + 1.0
    knows_pool = facts.total_blocks > 0
    turnover_s = REMAINING_TOKENS * (fixed_s + decoding_s)  # until the choices that run now have ended
    missing = of.maximum(wanted_blocks - facts.available_blocks, 0.0) * knows_pool
    missing_share = of.minimum(missing / of.maximum(facts.live_blocks, 1.0), 1.0)
    places_share = of.maximum((choices + request.choices) / facts.most_running - 1.0, 0.0)
    share = (facts.live_blocks + wanted_blocks) / of.maximum(facts.total_blocks, 1.0) * knows_pool
    # A worker may hold back waiting requests for blocks that running ones will need, even if some are free now.
    is_held_up = (missing > 0) | (places_share > 0) | (share > FORESEEN_SHARE)
    room_in_s = of.maximum(_admission_s(request, facts), turnover_s * of.maximum(missing_share, places_share))
    kv_wait_s = of.maximum(room_in_s - queue_s, 0.0) * is_held_up

    crowded = of.minimum(of.maximum((share - ROOMY_SHARE) / (1.0 - ROOMY_SHARE), 0.0), MOST_CROWDED)
    again = of.maximum(facts.decode_kv_tokens / of.maximum(choices, 1.0), float(len(request.prompt)))
    kv_penalty_s = crowded * crowded * again * token_s

    # The share counts relative to the freshest worker: a whole fleet may have started together.
    start = 1.0 - (fleet.freshest_share - of.maximum(facts.slow_start_share, LEAST_START_SHARE))
    slow_start_s = (1.0 / start - 1.0) * (queue_s + prefill_s + decode_s) * (start <= fleet.draw)
    # Time on the part that another worker holds.
    again_s = prefill_s * (fleet.most_matched - matched) / of.maximum(uncached, 1.0)
    others_s = OTHERS_SHARE * choices * (1.0 + fleet.shortest_queue_s / SHORT_QUEUE_S) * again_s
    return Terms(queue_s, prefill_s, decode_s, kv_wait_s, kv_penalty_s, slow_start_s, others_s)


def _cost_s(terms: Terms[Number]) -> Number:
    own_s = terms.queue_s + terms.prefill_s + terms.decode_s + terms.kv_wait_s
    return own_s + terms.kv_penalty_s + terms.slow_start_s + terms.others_s


def queued_before(lane: int, facts: WorkerFacts[Number]) -> Number:
    """Returns the uncached tokens of prompts that go before a request of the lane."""
    return (facts.queued_interactive, facts.queued_standard, facts.queued_batch)[lane]


def _admission_s(request: RouteRequest, facts: WorkerFacts[Number]) -> Number:
    return (facts.admission_interactive_s, facts.admission_standard_s, facts.admission_batch_s)[request.lane]


def _step_costs(facts: WorkerFacts[Column]) -> StepCost[Column]:
    """Replaces missing costs by the median of the others, or by the default."""
    unknown = np.isnan(facts.fixed_s)
    if not unknown.any():
        return StepCost(*facts[:4])
    costs = np.stack(facts[:4])
    known = costs[:, ~unknown]
    costs[:, unknown] = (np.median(known, axis=1) if known.size else np.array(DEFAULT_STEP_COST))[:, None]
    return StepCost(*costs)


def _step_costs_of(rows: Sequence[WorkerFacts[float]]) -> list[StepCost[float]]:
    """As _step_costs(), in plain Python."""
    known = [StepCost(*facts[:4]) for facts in rows if not math.isnan(facts.fixed_s)]
    if len(known) == len(rows):
        return known
    typical = StepCost(*map(median, zip(*known, strict=True))) if known else StepCost(*DEFAULT_STEP_COST)
    return [typical if math.isnan(facts.fixed_s) else StepCost(*facts[:4]) for facts in rows]
