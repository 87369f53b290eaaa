"""Policies to compare the router's own policies with; they exist only in the simulation.

They have the same data as the router's own policies: the exact index, the workers' samples and this router's credits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from trunkline_router.routing.prefix_index import PrefixIndex
from trunkline_router.routing.route import Route
from trunkline_router.routing.worker_state import WorkerState

TOKENS_PER_RUNNING_CHOICE = 16


@dataclass(frozen=True, slots=True)
class Seen:
    """A worker's state when a policy chooses."""

    matched_tokens: int  # of the prompt
    queued_tokens: int  # uncached tokens of requests without a first token
    running: int  # choices, including waiting ones
    sent: int  # choices that this router sent


# (tokens of the prompt, workers) → index of the chosen worker
Choose = Callable[[int, Sequence[Seen]], int]


def uncached_tokens(num_prompt: int, workers: Sequence[Seen]) -> int:
    """Trunkline's first policy: least tokens to compute before the first token, plus a toll per running choice."""
    costs = [
        num_prompt - worker.matched_tokens + worker.queued_tokens + TOKENS_PER_RUNNING_CHOICE * worker.running
        for worker in workers
    ]
    return costs.index(min(costs))


CACHE_THRESHOLD = 0.3
BALANCE_ABS_THRESHOLD = 64
BALANCE_REL_THRESHOLD = 1.5


def sglang_cache_aware(num_prompt: int, workers: Sequence[Seen]) -> int:
    """The SGLang gateway's `cache_aware` with its defaults: the worker with the fewest requests if the fleet is out of
    balance; else the longest prefix, if it is a large enough part of the prompt; else the fewest requests.

    The original approximates the caches by a tree of what was sent to each worker; here the index is exact.
    """
    loads = [worker.sent for worker in workers]
    least, most = min(loads), max(loads)
    if most - least > BALANCE_ABS_THRESHOLD and most > BALANCE_REL_THRESHOLD * least:
        return loads.index(least)
    matched = [worker.matched_tokens for worker in workers]
    longest = max(matched)
    if longest > CACHE_THRESHOLD * num_prompt:
        return min((load, place) for place, load in enumerate(loads) if matched[place] == longest)[1]
    return loads.index(least)


BASELINES: dict[str, Choose] = {"uncached-tokens": uncached_tokens, "sglang-cache-aware": sglang_cache_aware}


def rerouted(
    route: Route[WorkerState], index: PrefixIndex, workers: Sequence[WorkerState], choose: Choose
) -> Route[WorkerState]:
    """The same route with the worker that `choose` selects."""
    among = 0
    for worker in workers:
        among |= worker.blocks.bit
    found = index.match(route.chain, among)
    seen = []
    for worker in workers:
        matched = next(count for count, bits in found if bits & worker.blocks.bit)
        load = worker.load
        seen.append(
            Seen(
                matched * worker.model.block_size,
                max(worker.queued_tokens + worker.foreign.tokens, load.waiting_uncached_tokens),
                max(worker.open_choices + worker.foreign.choices, load.running + load.waiting),
                worker.open_choices,
            )
        )
    place = choose(len(route.request.prompt), seen)
    return replace(route, worker=workers[place], plan=replace(route.plan, chosen=place))
