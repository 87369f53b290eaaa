"""The routing policies: each is a pure function from a request and the workers' numbers to a worker and a reason.

predicted-ttft, the default, takes the worker that should give the first token soonest (ttft.py). Another worker
computes a popular prefix too once that costs less than waiting for the worker that holds it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trunkline_router.routing.route_request import PolicyName, RouteRequest, RoutingPolicy
from trunkline_router.routing.ttft import FEW_WORKERS, Prediction, Terms, predict, queued_before
from trunkline_router.routing.worker_facts import Column, WorkerTable, hash_53

# Predicted times within this share of the best, within the time of one block, or within NEAR_S count as equal. Workers'
# step costs differ by as much from measurement alone, and a worker that seems slower gets no request to correct that.
NEAR_SHARE = 0.02
NEAR_S = 3e-3
# A worker gets no request by rendezvous hashing while its choices exceed an even share by the first factor, and none
# for its sessions while they exceed it by the second.
HASH_LOAD_BOUND = 1.25
AFFINITY_LOAD_BOUND = 2.0


NO_TERMS = Terms(*[0.0] * len(Terms._fields))


class Why(StrEnum):
    """The kind of a decision's reason, for metrics."""

    SOONEST = "soonest"
    MOST_CACHED = "most_cached"  # of the workers near the soonest
    DRAWN = "drawn"  # among equals
    SESSION = "session"  # the holder of the session
    NO_SESSION = "no_session"  # these four: the soonest, because there is no holder to take
    SESSION_NEW = "session_new"
    SESSION_GONE = "session_gone"
    SESSION_FULL = "session_full"
    LEAST_LOAD = "least_load"
    HASHED = "hashed"
    IN_TURN = "in_turn"


class Candidate(NamedTuple):
    """A worker as the policy weighed it. The names are those of RouteCandidate in fleet.proto. From `queue_s` on they
    are those of Terms, in their order."""

    worker_id: str
    matched_tokens: int
    queued_tokens: int
    running: int
    queue_s: float
    prefill_s: float
    decode_s: float
    kv_wait_s: float
    kv_penalty_s: float
    slow_start_s: float
    others_s: float
    cost_s: float
    routed_by_load: bool


@dataclass(frozen=True, slots=True)
class RoutePlan:
    """A routing decision and its inputs, without the prompt: a plan may be kept."""

    policy: PolicyName
    chosen: int  # index of the worker: names may repeat if workers are misconfigured
    worker_id: str
    matched_tokens: int  # of the chosen worker
    reason: str  # in one sentence
    why: Why
    lane: int
    workers: WorkerTable
    prediction: Prediction | None  # None: the policy compares something else
    order: Sequence[float] | Column  # by worker: the value that the policy compared; less is better

    def candidate(self, place: int) -> Candidate:
        """Returns one of the workers."""
        workers = self.workers
        facts = workers.row(place)
        terms = NO_TERMS if self.prediction is None else self.prediction.terms_of(place)
        return Candidate(
            workers.worker_ids[place],
            int(workers.matched_tokens[place]),
            int(queued_before(self.lane, facts)),
            int(facts.choices),
            *terms,
            sum(terms),
            bool(facts.by_load),
        )

    def best(self, most: int) -> list[Candidate]:
        """Returns at most `most` candidates: the chosen worker, then the others from best to worst."""
        order = self.order
        if len(order) == 1:
            return [self.candidate(0)]
        if isinstance(order, np.ndarray):
            ranked = [int(place) for place in np.argsort(order, kind="stable")]
        else:  # of few workers
            ranked = sorted(range(len(order)), key=order.__getitem__)
        places = [place for place in ranked if place != self.chosen]
        return [self.candidate(place) for place in (self.chosen, *places[: most - 1])]

    @property
    def candidates(self) -> list[Candidate]:
        """All candidates, in the order of the workers."""
        return [self.candidate(place) for place in range(len(self.workers.worker_ids))]


@dataclass(frozen=True, slots=True)
class _Choice:
    place: int
    why: Why
    reason: str
    order: Sequence[float] | Column
    prediction: Prediction | None = None


def choose(
    request: RouteRequest, workers: WorkerTable, prefix_key: int, policy: RoutingPolicy, rng: Random
) -> RoutePlan:
    """Returns the plan for a request; there must be a worker. `prefix_key`: equal for prompts that begin alike."""
    match policy.name:
        case PolicyName.PREDICTED_TTFT:
            choice = _soonest(request, workers, rng)
        case PolicyName.SESSION_AFFINITY:
            choice = _holder(request, workers, policy, rng)
        case PolicyName.LEAST_LOAD:
            choice = _least_load(workers, rng)
        case PolicyName.CONSISTENT_HASH:
            choice = _hashed(request, workers, prefix_key)
        case PolicyName.ROUND_ROBIN:
            choice = _next_in_turn(workers, policy)
    place = choice.place
    return RoutePlan(
        policy.name,
        place,
        workers.worker_ids[place],
        int(workers.matched_tokens[place]),
        choice.reason,
        choice.why,
        request.lane,
        workers,
        choice.prediction,
        choice.order,
    )


def _soonest(request: RouteRequest, workers: WorkerTable, rng: Random) -> _Choice:
    """Draws one of the workers that have the least to compute among those near the soonest: so a tie does not make two
    workers compute a prefix, unrelated requests spread, and routers do not all choose the same worker."""
    prediction = predict(request, workers, rng.random())
    near, equals, near_s = (_equals_of_few if len(workers.worker_ids) <= FEW_WORKERS else _equals)(workers, prediction)
    place = _draw(equals, rng)
    cost_s = prediction.cost_s
    reason = f"the first token is expected in {cost_s[place] * 1e3:.1f} ms, "
    if len(equals) > 1:
        why = Why.DRAWN
        reason += f"drawn from {len(equals)} workers within {near_s * 1e3:.1f} ms of the soonest"
    elif near > 1:
        why = Why.MOST_CACHED
        reason += f"the most is cached of {near} workers within {near_s * 1e3:.1f} ms of the soonest"
    else:
        why = Why.SOONEST
        reason += "sooner than anywhere else"
    return _Choice(place, why, reason, cost_s, prediction)


def _equals(workers: WorkerTable, prediction: Prediction) -> tuple[int, Sequence[int] | NDArray[np.intp], float]:
    """Returns how many workers are near the soonest, those of them with the least to compute, and the near time."""
    cost_s, matched = np.asarray(prediction.cost_s), np.asarray(workers.matched_tokens)
    best = int(cost_s.argmin())
    near_s = _near_s(prediction, best)
    near = np.flatnonzero(cost_s <= float(cost_s[best]) + near_s)
    matched = matched[near]
    equals = near[matched > matched.max() - workers.columns.block_size[near]]
    return len(near), equals, near_s


def _equals_of_few(workers: WorkerTable, prediction: Prediction) -> tuple[int, Sequence[int], float]:
    """As _equals(), in plain Python: faster for a few workers."""
    cost_s, matched = prediction.cost_s, workers.matched_tokens
    best_s = min(cost_s)
    near_s = _near_s(prediction, list(cost_s).index(best_s))
    near = [place for place, worker_s in enumerate(cost_s) if worker_s <= best_s + near_s]
    most_matched = max(matched[place] for place in near)
    equals = [place for place in near if matched[place] > most_matched - workers.rows[place].block_size]
    return len(near), equals, near_s


def _near_s(prediction: Prediction, best: int) -> float:
    return max(NEAR_SHARE * float(prediction.cost_s[best]), NEAR_S, float(prediction.block_s[best]))


def _holder(request: RouteRequest, workers: WorkerTable, policy: RoutingPolicy, rng: Random) -> _Choice:
    """Takes the worker of the session's last request; the soonest if there is none, or it has too many choices."""
    soonest = _soonest(request, workers, rng)
    holder = policy.holder(request.affinity_key)
    if not request.affinity_key:
        why, told = Why.NO_SESSION, "the request has no session"
    elif holder is None:
        why, told = Why.SESSION_NEW, "the session is new"
    elif holder not in workers.worker_ids:
        why, told = Why.SESSION_GONE, f"the session's worker {holder} is not there"
    else:
        place = list(workers.worker_ids).index(holder)
        bound = _load_bound(workers, AFFINITY_LOAD_BOUND)
        choices = workers.row(place).choices
        if choices < bound:
            reason = "it had the session's last request"
            return _Choice(place, Why.SESSION, reason, soonest.order, soonest.prediction)
        told = f"the session's worker {holder} has {choices:.0f} choices, {bound:.0f} or more"
        why = Why.SESSION_FULL
    return _Choice(soonest.place, why, f"{told}: {soonest.reason}", soonest.order, soonest.prediction)


def _least_load(workers: WorkerTable, rng: Random) -> _Choice:
    choices = workers.columns.choices
    equals = np.flatnonzero(choices == choices.min())
    place = _draw(equals, rng)
    reason = f"it has {choices[place]:.0f} choices, no worker has fewer"
    if len(equals) > 1:
        reason += f"; drawn from {len(equals)} such"
    return _Choice(place, Why.LEAST_LOAD, reason, choices)


def _hashed(request: RouteRequest, workers: WorkerTable, prefix_key: int) -> _Choice:
    """Rendezvous hashing (Thaler and Ravishankar, 1998) with bounded loads (Mirrokni et al., 2018): every worker has a
    rank of its own for every key, so a worker that joins or leaves moves no key between the others."""
    key = hash_53(request.affinity_key) if request.affinity_key else prefix_key
    ranks = _mix(workers.columns.name_hash.astype(np.uint64) ^ np.uint64(key & (1 << 64) - 1)).astype(np.float64)
    bound = _load_bound(workers, HASH_LOAD_BOUND)
    full = workers.columns.choices >= bound
    order = np.where(full, np.inf, -ranks)
    place = int(order.argmin())
    of_what = "session" if request.affinity_key else "prompt's beginning"
    reason = f"it ranks first for the {of_what}"
    passed = int((full & (ranks > ranks[place])).sum())
    if passed:
        reason += f" after {passed} with {bound:.0f} choices or more"
    return _Choice(place, Why.HASHED, reason, order)


def _next_in_turn(workers: WorkerTable, policy: RoutingPolicy) -> _Choice:
    count = len(workers.worker_ids)
    place = policy.turn % count
    turns = (np.arange(count, dtype=np.float64) - place) % count
    return _Choice(place, Why.IN_TURN, "it is its turn", turns)


def _load_bound(workers: WorkerTable, factor: float) -> float:
    """Returns the number of choices that is too many: an even share, with the new request, times the factor."""
    choices = workers.columns.choices
    return float(np.ceil(factor * (choices.sum() + 1.0) / len(choices)))


def _draw(places: Sequence[int] | NDArray[np.intp], rng: Random) -> int:
    return int(places[rng.randrange(len(places))]) if len(places) > 1 else int(places[0])


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele et al., 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
