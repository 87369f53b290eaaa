"""Why little of a prompt was in a cache."""

import tracemalloc
from array import array
from collections.abc import Sequence
from random import Random

import pytest

from tests.router.fleet_of_states import BLOCK_SIZE, Fleet, cache, keys, prompt_of, report
from trunkline_router.routing.earlier_prompts import (
    MOST_KEYS,
    MOST_PROMPTS,
    CacheMiss,
    EarlierPrompt,
    EarlierPrompts,
    Prospect,
)
from trunkline_router.routing.prefix_index import PrefixIndex, WorkerBlocks
from trunkline_router.routing.worker_state import WorkerState

SYSTEM = prompt_of(1600)
TURN = [*SYSTEM, *prompt_of(800, seed=1)]  # of a conversation
NEXT = [*TURN, *prompt_of(400, seed=2)]
Told = tuple[CacheMiss | None, int]


class Conversations(Fleet):
    """Two workers, to which prompts are sent, and what is remembered of them."""

    def __init__(self) -> None:
        super().__init__(2)
        self.earlier = EarlierPrompts()

    def sent(self, prompt: Sequence[int]) -> tuple[Prospect, WorkerState]:
        route = self.route(prompt)
        return self.earlier.prospect(array("Q", route.chain), route), route.worker

    def turn(self, prompt: Sequence[int], *, has_answers: bool = True) -> Told:
        """A turn whose worker finds what it has reported and has it all in its cache afterwards."""
        prospect, worker = self.sent(prompt)
        found = min(worker.blocks.reported(keys(prompt)) * BLOCK_SIZE, (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE)
        self.earlier.add(prospect)
        cache(worker, prompt)
        return prospect.miss(found, has_answers=has_answers), prospect.seen

    def holder(self, prompt: Sequence[int]) -> WorkerState:
        (holder,) = (worker for worker in self.workers if worker.blocks.reported(keys(prompt)))
        return holder


def test_a_turn_that_finds_the_turn_before_it_has_missed_nothing() -> None:
    fleet = Conversations()
    assert fleet.turn(TURN, has_answers=False) == (CacheMiss.NEW, 0)
    assert fleet.turn(NEXT) == (None, 2400)
    assert fleet.turn(NEXT) == (None, 2784), "the same prompt again: its last token is computed"


@pytest.mark.parametrize("at", [0, 200, 1800])
def test_a_turn_whose_beginning_changed_is_told_where(at: int) -> None:
    fleet = Conversations()
    fleet.turn(TURN)
    changed = NEXT.copy()
    changed[at] += 1
    assert fleet.turn(changed) == (CacheMiss.CHANGED, at // BLOCK_SIZE * BLOCK_SIZE)
    assert fleet.turn([*changed, 1, 2, 3])[0] is None, "what follows is compared with the changed one"


def test_a_first_turn_is_new_after_the_system_prompt_that_it_shares() -> None:
    fleet = Conversations()
    fleet.turn(TURN)
    assert fleet.turn([*SYSTEM, *prompt_of(700, seed=3)], has_answers=False) == (CacheMiss.NEW, 1600)
    assert fleet.turn([*SYSTEM, *prompt_of(40, seed=4)], has_answers=False)[0] is None, "little of it was new"


def test_conversations_with_one_system_prompt_are_not_taken_for_each_other() -> None:
    fleet = Conversations()
    prompts = [[*SYSTEM, *prompt_of(length, seed=length)] for length in range(250, 410, 20)]
    for prompt in prompts:
        fleet.turn(prompt, has_answers=False)
    for worker in fleet.workers:
        worker.blocks.clear()
    for prompt in prompts:
        assert fleet.turn([*prompt, *prompt_of(60, seed=9)]) == (
            CacheMiss.EVICTED,
            len(prompt) // BLOCK_SIZE * BLOCK_SIZE,
        )


def test_a_turn_that_goes_to_another_worker_is_told_so() -> None:
    fleet = Conversations()
    fleet.turn(TURN)
    report(fleet.holder(TURN), running=200, waiting=200, waiting_tokens=10**6, uncached_tokens_by_lane=[0, 10**6, 0])
    assert fleet.turn(NEXT) == (CacheMiss.OTHER_WORKER, 2400)


def test_a_turn_that_is_not_known_here_is_known_by_the_workers_caches() -> None:
    fleet = Conversations()
    fleet.turn([*SYSTEM, *prompt_of(900, seed=3)])
    cache(fleet.holder(SYSTEM), TURN)  # of another router
    assert fleet.turn(NEXT) == (None, 2400)
    prospect, _ = fleet.sent([*NEXT, *NEXT])
    assert prospect.miss(0, has_answers=True) is CacheMiss.EVICTED
    assert prospect.miss(2900, has_answers=True) is None, "more than is known was found"


def test_a_turn_whose_blocks_are_gone_is_told_whether_they_were_evicted_or_lost_with_their_worker() -> None:
    fleet = Conversations()
    fleet.turn(TURN)
    holder = fleet.holder(TURN)
    holder.blocks.remove(keys(TURN)[20:])
    assert fleet.turn(NEXT) == (CacheMiss.EVICTED, 2400)
    holder = fleet.holder(NEXT)
    holder.blocks.close()
    fleet.workers.remove(holder)
    assert fleet.turn(NEXT) == (CacheMiss.LOST, 2784)


def test_a_worker_whose_reports_do_not_count_has_lost_nothing_by_that() -> None:
    fleet = Conversations()
    fleet.turn(TURN)
    holder = fleet.holder(TURN)
    holder.blocks.count_reports(count=False)
    report(holder, running=200, waiting=200, waiting_tokens=10**6, uncached_tokens_by_lane=[0, 10**6, 0])
    assert fleet.turn(NEXT) == (CacheMiss.OTHER_WORKER, 2400)


def test_requests_that_begin_alike_at_the_same_time_are_told_that_one_is_computing() -> None:
    fleet = Conversations()
    first, worker = fleet.sent(TURN)
    with fleet.route(TURN).in_flight():
        second, same = fleet.sent([*TURN, 1])
    assert worker is same
    assert first.miss(0, has_answers=False) is CacheMiss.NEW
    assert second.miss(0, has_answers=False) is CacheMiss.COMPUTING


def test_a_prompt_without_a_whole_block_or_without_use_of_the_cache_misses_nothing() -> None:
    fleet = Conversations()
    assert fleet.turn(prompt_of(BLOCK_SIZE)) == (None, 0)
    fleet.turn(TURN)
    route = fleet.route(TURN, may_use_cache=False)
    assert fleet.earlier.prospect(array("Q", route.chain), route).miss(0, has_answers=True) is None


def test_memory_is_bounded_and_a_conversation_counts_once() -> None:
    fleet = Conversations()
    for length in range(20, len(NEXT), 20):
        fleet.turn(NEXT[:length])
    assert (len(fleet.earlier), fleet.earlier.num_keys) == (1, 173)
    blocks, draw = WorkerBlocks(PrefixIndex()), Random(0)
    tracemalloc.start()
    try:
        earlier = EarlierPrompts()
        for _ in range(MOST_PROMPTS + 200):
            prompt = EarlierPrompt(array("Q", draw.randbytes(8 * 800)), blocks)
            earlier.add(Prospect(prompt, None, 0, 0, CacheMiss.NEW))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.99 * MOST_KEYS < earlier.num_keys <= MOST_KEYS
    assert held < 8 * MOST_KEYS + 4096 * MOST_PROMPTS
    earlier.add(Prospect(EarlierPrompt(array("Q", range(MOST_KEYS + 1)), blocks), None, 0, 0, CacheMiss.NEW))
    assert (len(earlier), earlier.num_keys, len(earlier._latest)) == (0, 0, 0)
