"""The policies beside the default one: as soonest() in policy.py, each chooses a worker. Pure."""

from random import Random

import numpy as np
from numpy.typing import NDArray

from trunkline_router.routing.policy import Choice, Why, draw, soonest
from trunkline_router.routing.route_request import RouteRequest, RoutingPolicy
from trunkline_router.routing.worker_facts import WorkerTable, hash_53

# A worker gets no request by rendezvous hashing while its choices exceed an even share by the first factor, and none
# for its sessions while they exceed it by the second.
HASH_LOAD_BOUND = 1.25
AFFINITY_LOAD_BOUND = 2.0


def holder(request: RouteRequest, workers: WorkerTable, policy: RoutingPolicy, rng: Random) -> Choice:
    """Takes the worker of the session's last request; the soonest if there is none, or it has too many choices."""
    choice = soonest(request, workers, rng)
    worker_id = policy.holder(request.affinity_key)
    if not request.affinity_key:
        why, because = Why.NO_SESSION, "the request has no session"
    elif worker_id is None:
        why, because = Why.SESSION_NEW, "the session is new"
    elif worker_id not in workers.worker_ids:
        why, because = Why.SESSION_GONE, f"the session's worker {worker_id} is not there"
    else:
        place = list(workers.worker_ids).index(worker_id)
        bound = _load_bound(workers, AFFINITY_LOAD_BOUND)
        choices = workers.row(place).choices
        if choices < bound:
            return choice._replace(place=place, why=Why.SESSION, reason="it had the session's last request")
        because = f"the session's worker {worker_id} has {choices:.0f} choices, {bound:.0f} or more"
        why = Why.SESSION_FULL
    return choice._replace(why=why, reason=f"{because}: {choice.reason}")


def least_load(workers: WorkerTable, rng: Random) -> Choice:
    choices = workers.columns.choices
    equals = np.flatnonzero(choices == choices.min())
    place = draw(equals, rng)
    reason = f"it has {choices[place]:.0f} choices, no worker has fewer"
    if len(equals) > 1:
        reason += f"; drawn from {len(equals)} such"
    return Choice(place, Why.LEAST_LOAD, reason, choices)


def hashed(request: RouteRequest, workers: WorkerTable, prefix_key: int) -> Choice:
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
    return Choice(place, Why.HASHED, reason, order)


def next_in_turn(workers: WorkerTable, policy: RoutingPolicy) -> Choice:
    count = len(workers.worker_ids)
    place = policy.turn % count
    turns = (np.arange(count, dtype=np.float64) - place) % count
    return Choice(place, Why.IN_TURN, "it is its turn", turns)


def _load_bound(workers: WorkerTable, factor: float) -> float:
    """Returns the number of choices that is too many: an even share, with the new request, times the factor."""
    choices = workers.columns.choices
    return float(np.ceil(factor * (choices.sum() + 1.0) / len(choices)))


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele et al., 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
