"""Which worker gets a request: the longest held prefix, discounted by load. A pure function.

Cost is counted in tokens that the worker has to compute before the request's first one: what it lacks of the prompt,
what waits there already, and a toll for each running choice, whose decodes share every step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

# A running choice slows a prefill about as much as this many tokens ahead of it in the queue would.
TOKENS_PER_RUNNING_CHOICE = 16


@dataclass(frozen=True, slots=True)
class WorkerView:
    """What is known of a worker at the moment of choosing. All numbers are tokens, but `running`."""

    worker_id: str
    matched_tokens: int  # of the prompt, held by its cache
    queued_tokens: int  # uncached ones of requests that have no first token yet
    running: int  # choices


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker with what it would cost, for the trace."""

    view: WorkerView
    cost_tokens: int


@dataclass(frozen=True, slots=True)
class RoutePlan:
    """The decision and what it was made of."""

    chosen: int  # index into `candidates`: names may repeat where workers are set up carelessly
    worker_id: str
    matched_tokens: int
    candidates: tuple[Candidate, ...]


def choose(num_prompt: int, views: Sequence[WorkerView], block_size: int, rng: Random) -> RoutePlan:
    """The plan for a prompt of `num_prompt` tokens; `views` must not be empty.

    Workers within less than one block of the best are equals, and one of them is drawn: unrelated requests spread.
    """
    candidates = tuple(
        Candidate(
            view, num_prompt - view.matched_tokens + view.queued_tokens + TOKENS_PER_RUNNING_CHOICE * view.running
        )
        for view in views
    )
    best = min(candidate.cost_tokens for candidate in candidates)
    equals = [index for index, candidate in enumerate(candidates) if candidate.cost_tokens < best + block_size]
    chosen = rng.choice(equals)
    view = candidates[chosen].view
    return RoutePlan(chosen, view.worker_id, view.matched_tokens, candidates)
