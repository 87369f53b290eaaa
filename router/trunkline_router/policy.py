"""Which worker gets a request, and why: one pure function of what is known of the workers, for each policy there is.

predicted-ttft, the default, takes the worker that should give the first token soonest (ttft.py). A prefix that many
want is computed by another worker too as soon as waiting for its holder costs more than that.
"""

from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray

from trunkline_router.policies import PolicyName, RoutingPolicy
from trunkline_router.route_request import RouteRequest
from trunkline_router.ttft import LANE_NAMES, TERM_NAMES, Terms, block_s, predict
from trunkline_router.worker_facts import Column, WorkerTable, hash_53

# Predicted times within this share of the best, within the time of one block, or within this time are equals. What
# workers have learned of their steps differs by as much, and one that seems slower is never sent what would correct it.
NEAR_SHARE = 0.02
NEAR_S = 3e-3
# A worker takes no request for its place on the hash ring while it has more than its even share of choices by this
# factor, and none for its sessions by that one.
HASH_LOAD_BOUND = 1.25
SESSION_LOAD_BOUND = 2.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker as it was weighed. See RouteCandidate in fleet.proto; the names are the same."""

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
    """The decision and what it was made of."""

    policy: PolicyName
    chosen: int  # place among the workers: names may repeat where workers are set up carelessly
    worker_id: str
    matched_tokens: int  # of the chosen worker
    reason: str  # in one sentence
    request: RouteRequest
    workers: WorkerTable
    terms: Terms | None  # None: the policy compares something else
    order: Column  # what the policy compared, by worker: less is better

    def candidate(self, place: int) -> Candidate:
        """One of the workers."""
        workers = self.workers
        costs = {} if self.terms is None else {name: float(getattr(self.terms, name)[place]) for name in TERM_NAMES}
        return Candidate(
            worker_id=workers.worker_ids[place],
            matched_tokens=int(workers.matched_tokens[place]),
            queued_tokens=int(workers[f"queued_{LANE_NAMES[self.request.lane]}"][place]),
            running=int(workers["choices"][place]),
            routed_by_load=bool(workers["by_load"][place]),
            cost_s=sum(costs.values()),
            **(costs or dict.fromkeys(TERM_NAMES, 0.0)),
        )

    def best(self, most: int) -> list[Candidate]:
        """The chosen one, then the others, the better ones first; `most` in all."""
        places = [int(place) for place in np.argsort(self.order, kind="stable") if place != self.chosen]
        return [self.candidate(place) for place in (self.chosen, *places[: most - 1])]

    @property
    def candidates(self) -> list[Candidate]:
        """All, in the order in which they were given."""
        return [self.candidate(place) for place in range(len(self.workers.worker_ids))]


@dataclass(frozen=True, slots=True)
class _Choice:
    place: int
    reason: str
    order: Column
    terms: Terms | None = None


def choose(
    request: RouteRequest, workers: WorkerTable, prefix_key: int, policy: RoutingPolicy, rng: Random
) -> RoutePlan:
    """The plan for a request; there must be a worker.  prefix_key: equal for prompts that begin alike"""
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
        request,
        workers,
        choice.terms,
        choice.order,
    )


def _soonest(request: RouteRequest, workers: WorkerTable, rng: Random) -> _Choice:
    """Of near-equals, those with the least to compute: a tie is no reason to compute a prefix once more. Of these, one
    is drawn: unrelated requests spread, and routers that know the same do not all choose the same."""
    terms = predict(request, workers, rng.random())
    cost_s = terms.cost_s()
    best = int(cost_s.argmin())
    best_s = float(cost_s[best])
    near_s = max(NEAR_SHARE * best_s, NEAR_S, float(block_s(workers)[best]))
    near = np.flatnonzero(cost_s <= best_s + near_s)
    matched = workers.matched_tokens[near]
    equals = near[matched > matched.max() - workers["block_size"][near]]
    place = _draw(equals, rng)
    reason = f"the first token is expected in {cost_s[place] * 1e3:.1f} ms, "
    if len(equals) > 1:
        reason += f"drawn from {len(equals)} workers within {near_s * 1e3:.1f} ms of the soonest"
    elif len(near) > 1:
        reason += f"the most is cached of {len(near)} workers within {near_s * 1e3:.1f} ms of the soonest"
    else:
        reason += "sooner than anywhere else"
    return _Choice(place, reason, cost_s, terms)


def _holder(request: RouteRequest, workers: WorkerTable, policy: RoutingPolicy, rng: Random) -> _Choice:
    """The worker that had the session's last request; without one, or where it has too much to do, the soonest."""
    soonest = _soonest(request, workers, rng)
    holder = policy.holder(request.session)
    if not request.session:
        why = "the request has no session"
    elif holder is None:
        why = "the session is new"
    elif holder not in workers.worker_ids:
        why = f"the session's worker {holder} is not there"
    else:
        place = list(workers.worker_ids).index(holder)
        bound = _load_bound(workers, SESSION_LOAD_BOUND)
        if workers["choices"][place] < bound:
            return _Choice(place, "it had the session's last request", soonest.order, soonest.terms)
        why = f"the session's worker {holder} has {workers['choices'][place]:.0f} choices, {bound:.0f} or more"
    return _Choice(soonest.place, f"{why}: {soonest.reason}", soonest.order, soonest.terms)


def _least_load(workers: WorkerTable, rng: Random) -> _Choice:
    choices = workers["choices"]
    equals = np.flatnonzero(choices == choices.min())
    place = _draw(equals, rng)
    reason = f"it has {choices[place]:.0f} choices, no worker has fewer"
    if len(equals) > 1:
        reason += f"; drawn from {len(equals)} such"
    return _Choice(place, reason, choices)


def _hashed(request: RouteRequest, workers: WorkerTable, prefix_key: int) -> _Choice:
    """Rendezvous hashing (Thaler and Ravishankar, 1998) with bounded loads (Mirrokni et al., 2018): every worker has a
    rank of its own for every key, so one that comes or goes moves no key between others."""
    key = hash_53(request.session) if request.session else prefix_key
    ranks = _mix(workers["name_hash"].astype(np.uint64) ^ np.uint64(key & (1 << 64) - 1)).astype(np.float64)
    bound = _load_bound(workers, HASH_LOAD_BOUND)
    full = workers["choices"] >= bound
    order = np.where(full, np.inf, -ranks)
    place = int(order.argmin())
    of_what = "session" if request.session else "prompt's beginning"
    reason = f"it ranks first for the {of_what}"
    passed = int((full & (ranks > ranks[place])).sum())
    if passed:
        reason += f" after {passed} with {bound:.0f} choices or more"
    return _Choice(place, reason, order)


def _next_in_turn(workers: WorkerTable, policy: RoutingPolicy) -> _Choice:
    count = len(workers.worker_ids)
    place = policy.turn % count
    turns = (np.arange(count, dtype=np.float64) - place) % count
    return _Choice(place, "it is its turn", turns)


def _load_bound(workers: WorkerTable, factor: float) -> float:
    """So many choices are too many: more than an even share, the new one included, times a factor."""
    choices = workers["choices"]
    return float(np.ceil(factor * (choices.sum() + 1.0) / len(choices)))


def _draw(places: NDArray[np.intp], rng: Random) -> int:
    return int(places[rng.randrange(len(places))]) if len(places) > 1 else int(places[0])


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele et al., 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
