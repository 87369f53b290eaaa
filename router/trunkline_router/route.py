"""From a prompt and the workers of its model to the worker that gets it: hashing, matching, choosing. Pure."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Generic, TypeVar

from trunkline.block_hash import prompt_hashes, root_hash
from trunkline_router.policies import RoutingPolicy
from trunkline_router.policy import RoutePlan, choose
from trunkline_router.prefix_index import PrefixIndex, keys_of
from trunkline_router.route_request import RouteRequest
from trunkline_router.worker_state import InFlight, WorkerState

W = TypeVar("W", bound=WorkerState)


@dataclass(frozen=True, slots=True)
class Route(Generic[W]):
    """Where a request goes: the worker, the prompt's keys as that worker counts them, and why it was chosen."""

    request: RouteRequest
    worker: W
    chain: list[int]
    plan: RoutePlan
    policy: RoutingPolicy

    @contextmanager
    def in_flight(self) -> Iterator[InFlight]:
        """Counts the request at its worker from dispatch to its end, whichever way it ends."""
        self.policy.has_sent(self.request.session, self.worker.model.worker_id)
        with self.worker.in_flight(self.request, self.plan, self.chain) as flight:
            yield flight


def route(
    index: PrefixIndex, workers: Sequence[W], request: RouteRequest, policy: RoutingPolicy, rng: Random
) -> Route[W]:
    """Chooses among `workers`, at least one, all of which could answer. Changes nothing: see Route.in_flight()."""
    chains = _chains(workers, request.prompt, request.salt)
    matched: dict[int, int] = {}  # by a worker's bit: leading blocks that it holds
    for chain, among in chains.values():
        for count, bits in index.match(chain, among):
            while bits:
                bit = bits & -bits
                matched[bit] = count
                bits ^= bit
    views = [worker.view(matched[worker.blocks.bit]) for worker in workers]
    plan = choose(len(request.prompt), views, workers[0].model.block_size, rng)
    chosen = workers[plan.chosen]
    chain = chains[chosen.model.fingerprint, chosen.model.block_size][0]
    return Route(request, chosen, chain, plan, policy)


def _chains(
    workers: Sequence[WorkerState], prompt: Sequence[int], salt: bytes
) -> dict[tuple[str, int], tuple[list[int], int]]:
    """The prompt's keys, and the bits of the workers that count them so: those with other weights or block sizes
    hash otherwise."""
    chains: dict[tuple[str, int], tuple[list[int], int]] = {}
    for worker in workers:
        kind = worker.model.fingerprint, worker.model.block_size
        if kind not in chains:
            hashes = prompt_hashes(root_hash(worker.model.fingerprint, salt=salt), prompt, worker.model.block_size)
            chains[kind] = keys_of(b"".join(hashes)), 0
        chain, among = chains[kind]
        chains[kind] = chain, among | worker.blocks.bit
    return chains
