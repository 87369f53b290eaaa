"""Routes a prompt to one of its model's workers: hashing, matching, choosing. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from trunkline.block_hash import prompt_hashes, root_hash
from trunkline_router.routing import other_policies
from trunkline_router.routing.first_token import first_token_s
from trunkline_router.routing.policy import RoutePlan, soonest
from trunkline_router.routing.prefix_index import PrefixIndex, keys_of
from trunkline_router.routing.route_request import PolicyName, RouteRequest, RoutingPolicy
from trunkline_router.routing.ttft import FEW_WORKERS
from trunkline_router.routing.worker_facts import Column, WorkerTable
from trunkline_router.routing.worker_state import InFlight, Kind, WorkerState

W = TypeVar("W", bound=WorkerState)

# Prompts that share this many leading blocks count as beginning alike.
BEGINNING_BLOCKS = 16
# More set bits than this are found faster all at once.
FEW_BITS = 8


@dataclass(frozen=True, slots=True)
class Route(Generic[W]):
    """A request's worker, the prompt's block keys for that worker, and the decision."""

    request: RouteRequest
    worker: W
    chain: list[int]
    plan: RoutePlan
    policy: RoutingPolicy

    def first_token_s(self) -> float | None:
        """Predicts the time from the decision to the first token; None if the policy predicts nothing. To be called
        before in_flight()."""
        return first_token_s(self.request, self.worker, self.plan)

    def in_flight(self, *, is_granted: bool = False) -> InFlight:
        """Counts the request at its worker, from now until the context closes."""
        self.policy.has_sent(self.request.affinity_key, self.worker.worker_id)
        return InFlight(self.worker, self.request, self.plan.matched_tokens, self.chain, is_granted=is_granted)


def route(
    index: PrefixIndex, workers: Sequence[W], request: RouteRequest, policy: RoutingPolicy, rng: Random
) -> Route[W]:
    """Chooses among `workers`, at least one, all able to answer. Changes no state: see Route.in_flight()."""
    return route_chains(index, workers, request, chains_of(workers, request), policy, rng)


def chains_of(workers: Iterable[WorkerState], request: RouteRequest) -> dict[Kind, list[int]]:
    """Returns the prompt's block keys for each pair of weights and block size among the workers."""
    return {kind: _chain(kind, request) for kind in {worker.kind for worker in workers}}


def route_chains(
    index: PrefixIndex,
    workers: Sequence[W],
    request: RouteRequest,
    chains: Mapping[Kind, list[int]],
    policy: RoutingPolicy,
    rng: Random,
) -> Route[W]:
    """As route(), for a prompt that is already hashed."""
    matched_tokens: Sequence[float] | Column
    if len(workers) <= FEW_WORKERS:
        matched_tokens = [_matched_there(index, worker, chains[worker.kind], request) for worker in workers]
    elif len(chains) == 1:
        ((kind, chain),) = chains.items()
        slots = np.array([worker.blocks.slot for worker in workers])
        matched_tokens = _matched_tokens(index, chain, slots, kind[1], request)
    else:
        matched_tokens = np.zeros(len(workers))
        for kind, chain in chains.items():
            places = np.array([place for place, worker in enumerate(workers) if worker.kind == kind])
            slots = np.array([workers[place].blocks.slot for place in places])
            matched_tokens[places] = _matched_tokens(index, chain, slots, kind[1], request)
    table = WorkerTable([worker.worker_id for worker in workers], matched_tokens, [w.row() for w in workers])
    beginning = chains[workers[0].kind][:BEGINNING_BLOCKS]
    plan = choose(request, table, beginning[-1] if beginning else 0, policy, rng)
    chosen = workers[plan.chosen]
    return Route(request, chosen, chains[chosen.kind], plan, policy)


def _chain(kind: Kind, request: RouteRequest) -> list[int]:
    fingerprint, block_size = kind
    hashes = prompt_hashes(root_hash(fingerprint, *request.adapter, salt=request.salt), request.prompt, block_size)
    return keys_of(b"".join(hashes))


def _matched_there(index: PrefixIndex, worker: WorkerState, chain: Sequence[int], request: RouteRequest) -> float:
    """Returns how many leading tokens of the prompt one worker need not compute."""
    ((count, _),) = index.match(chain, worker.blocks.bit)
    block_size = worker.kind[1]
    return float(min(count * block_size, request.most_reusable(block_size)))


def _matched_tokens(
    index: PrefixIndex, chain: Sequence[int], slots: NDArray[np.int64], block_size: int, request: RouteRequest
) -> Column:
    """Returns how many leading tokens of the prompt the workers in these slots need not compute: [num_slots]."""
    num_slots = index.num_slots
    asked = np.zeros(num_slots, np.bool_)
    asked[slots] = True
    among = int.from_bytes(np.packbits(asked, bitorder="little").tobytes(), "little")
    counts = np.zeros(num_slots)
    for count, bits in index.match(chain, among):
        if not count:
            continue
        if bits.bit_count() > FEW_BITS:
            packed = np.frombuffer(bits.to_bytes((num_slots + 7) // 8, "little"), np.uint8)
            counts[np.unpackbits(packed, count=num_slots, bitorder="little").view(np.bool_)] = count
            continue
        while bits:
            bit = bits & -bits
            counts[bit.bit_length() - 1] = count
            bits ^= bit
    return np.minimum(counts[slots] * block_size, request.most_reusable(block_size))


def choose(
    request: RouteRequest, workers: WorkerTable, prefix_key: int, policy: RoutingPolicy, rng: Random
) -> RoutePlan:
    """Returns the plan for a request; there must be a worker. `prefix_key`: equal for prompts that begin alike."""
    match policy.name:
        case PolicyName.PREDICTED_TTFT:
            choice = soonest(request, workers, rng)
        case PolicyName.SESSION_AFFINITY:
            choice = other_policies.holder(request, workers, policy, rng)
        case PolicyName.LEAST_LOAD:
            choice = other_policies.least_load(workers, rng)
        case PolicyName.CONSISTENT_HASH:
            choice = other_policies.hashed(request, workers, prefix_key)
        case PolicyName.ROUND_ROBIN:
            choice = other_policies.next_in_turn(workers, policy)
    return RoutePlan(*choice, policy.name, request.lane, workers)
