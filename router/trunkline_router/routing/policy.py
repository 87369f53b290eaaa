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

from trunkline_router.routing.route_request import PolicyName, RouteRequest
from trunkline_router.routing.ttft import FEW_WORKERS, Prediction, Terms, predict, queued_before
from trunkline_router.routing.worker_facts import Column, WorkerTable

# Predicted times within this share of the best, within the time of one block, or within NEAR_S count as equal. Workers'
# step costs differ by as much from measurement alone, and a worker that seems slower gets no request to correct that.
NEAR_SHARE = 0.02
NEAR_S = 3e-3
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


class Choice(NamedTuple):
    """The first fields of RoutePlan."""

    place: int
    why: Why
    reason: str
    order: Sequence[float] | Column
    prediction: Prediction | None = None


@dataclass(frozen=True, slots=True)
class RoutePlan:
    """A routing decision and its inputs, without the prompt: a plan may be kept."""

    chosen: int  # index of the worker: names may repeat if workers are misconfigured
    why: Why
    reason: str  # in one sentence
    order: Sequence[float] | Column  # by worker: the value that the policy compared; less is better
    prediction: Prediction | None  # None: the policy compares something else
    policy: PolicyName
    lane: int
    workers: WorkerTable

    @property
    def worker_id(self) -> str:
        return self.workers.worker_ids[self.chosen]

    @property
    def matched_tokens(self) -> int:
        """Leading tokens of the prompt in the chosen worker's cache."""
        return int(self.workers.matched_tokens[self.chosen])

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


def soonest(request: RouteRequest, workers: WorkerTable, rng: Random) -> Choice:
    """Draws one of the workers that have the least to compute among those near the soonest: so a tie does not make two
    workers compute a prefix, unrelated requests spread, and routers do not all choose the same worker."""
    prediction = predict(request, workers, rng.random())
    near, equals, near_s = (_equals_of_few if len(workers.worker_ids) <= FEW_WORKERS else _equals)(workers, prediction)
    place = draw(equals, rng)
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
    return Choice(place, why, reason, cost_s, prediction)


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


def draw(places: Sequence[int] | NDArray[np.intp], rng: Random) -> int:
    return int(places[rng.randrange(len(places))]) if len(places) > 1 else int(places[0])
