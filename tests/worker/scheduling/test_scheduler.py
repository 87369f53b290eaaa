"""Scheduling: budget, order, sharing, preemption, abort."""

from typing import Any

import pytest

from tests.worker.rig import BLOCK_SIZE, Rig
from trunkline_worker.cache.sequence import Finish
from trunkline_worker.scheduler.limits import AdmissionRule
from trunkline_worker.scheduler.prompts import MAX_DEFERRED

OPTIMISTIC = AdmissionRule.OPTIMISTIC


def reference(prompt: list[int], max_tokens: int, **options: Any) -> list[int]:
    """What a sequence generates alone, in a pool with room, its prompt computed at once."""
    rig = Rig(num_blocks=256, max_step_tokens=1024)
    rig.submit(prompt, max_tokens, **options)
    rig.run()
    return rig.outputs[1]


@pytest.mark.parametrize("length", [1, 3 * BLOCK_SIZE - 1, 3 * BLOCK_SIZE, 3 * BLOCK_SIZE + 1])
def test_a_wholly_cached_prompt_still_computes_a_token(length: int) -> None:
    rig = Rig()
    prompt = list(range(50, 50 + length))
    for _ in range(2):
        rig.submit(prompt, max_tokens=5)
        rig.run()
    assert rig.outputs[1] == rig.outputs[2] == reference(prompt, 5)
    assert rig.cached[2] == (length - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert rig.sequences[2].cached_tokens is not None
    assert rig.sequences[2].cached_tokens < length


def test_tokens_are_counted_after_the_cache_match() -> None:
    rig = Rig(max_step_tokens=8)
    prompt = list(range(40))
    rig.submit(prompt, max_tokens=1)
    rig.run()
    rig.submit([*prompt, 1, 2, 3], max_tokens=1)
    rig.step()
    assert rig.plans[-1].num_tokens == 3, "only what the cache lacks is charged to the budget"
    assert 2 in rig.finished


def test_a_sequence_preempted_one_token_past_a_block_computes_the_same_again() -> None:
    rig = Rig(num_blocks=5, admission=OPTIMISTIC)  # both need a third block in the same step, and one is left
    old, young = rig.submit([1, 2, 3, 4], max_tokens=12), rig.submit([5, 6, 7, 8], max_tokens=12)
    while not rig.stats.preemptions:
        rig.step()
    assert len(rig.sequences[young].token_ids) == 2 * BLOCK_SIZE + 1
    rig.run()
    assert rig.outputs[old] == reference([1, 2, 3, 4], 12)
    assert rig.outputs[young] == reference([5, 6, 7, 8], 12)


def test_a_lone_request_that_outgrows_the_pool_ends_by_length() -> None:
    rig = Rig(num_blocks=3)
    rig.submit([1, 2, 3, 4, 5], max_tokens=1000)
    rig.run(most_steps=50)
    assert rig.finished == {1: Finish.LENGTH}
    assert len(rig.outputs[1]) == 3 * BLOCK_SIZE - 5
    assert rig.blocks.num_live == 0


def test_an_abort_in_flight_frees_its_blocks_once_and_after_the_step() -> None:
    rig = Rig()
    doomed = rig.submit([1, 2, 3, 4, 5], max_tokens=9)
    other = rig.submit([6, 7, 8], max_tokens=9)
    rig.step()
    scheduled = rig.schedule()
    assert scheduled is not None
    live = rig.blocks.num_live
    assert rig.abort(doomed)
    assert not rig.abort(doomed), "the second abort finds nothing"
    rig.scheduler.check_integrity()
    assert rig.blocks.num_live == live, "the step in flight still writes them"
    outputs = rig.commit(*scheduled)
    assert [output.sequence_id for output in outputs] == [other]
    assert rig.blocks.num_live < live
    rig.run()
    assert rig.outputs[other] == reference([6, 7, 8], 9)


def test_an_abort_of_a_sequence_that_finishes_in_the_same_step() -> None:
    rig = Rig()
    doomed = rig.submit([1, 2, 3, 4, 5], max_tokens=1)
    scheduled = rig.schedule()
    assert scheduled is not None
    rig.abort(doomed)
    assert rig.commit(*scheduled) == []
    assert not rig.abort(doomed)
    assert rig.blocks.num_live == 0


def test_nothing_is_live_after_everything_has_ended() -> None:
    rig = Rig(num_blocks=24)
    for n in range(12):
        rig.submit(list(range(n, n + 10)), max_tokens=6)
    for _ in range(3):
        rig.step()
    rig.abort(3)
    rig.abort(12)
    rig.run()
    assert rig.blocks.num_live == 0
    assert rig.blocks.num_cached > 0, "cached blocks are no leak"
    assert not rig.scheduler.has_work


def test_a_chunk_that_is_not_the_last_emits_no_token() -> None:
    rig = Rig(max_step_tokens=4)
    rig.submit(list(range(10)), max_tokens=3)
    assert rig.step() == []
    assert rig.step() == []
    assert len(rig.step()) == 1
    assert [plan.num_tokens for plan in rig.plans] == [4, 4, 2]


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64])
def test_chunks_do_not_change_what_is_generated(chunk: int) -> None:
    rig = Rig(max_step_tokens=chunk)
    prompts = [list(range(n, n + 3 + 5 * n)) for n in range(4)]
    ids = [rig.submit(prompt, max_tokens=7) for prompt in prompts]
    rig.run()
    assert [rig.outputs[n] for n in ids] == [reference(prompt, 7) for prompt in prompts]


def test_running_decodes_are_served_before_a_long_prompt() -> None:
    rig = Rig(max_step_tokens=8)
    for n in range(4):
        rig.submit([n], max_tokens=20)
    rig.step()
    rig.submit(list(range(100)), max_tokens=2)
    rig.step()
    assert [step.num_new for step in rig.plans[-1].steps] == [1, 1, 1, 1, 4]


def test_a_common_prefix_that_arrives_together_is_computed_once() -> None:
    rig = Rig(max_step_tokens=1024)
    prefix = list(range(200, 200 + 10 * BLOCK_SIZE))
    ids = [rig.submit([*prefix, n], max_tokens=2) for n in range(6)]
    rig.run()
    assert rig.tokens_computed == len(prefix) + 6 * 2, "the prefix, and for each its own token and one output token"
    assert [rig.outputs[n] for n in ids] == [reference([*prefix, n], 2) for n in range(6)]


def test_a_sequence_that_waits_for_a_prefix_continues_when_its_leader_is_aborted() -> None:
    rig = Rig(max_step_tokens=8)
    prompt = list(range(40))
    leader, follower = rig.submit(prompt, max_tokens=2), rig.submit(prompt, max_tokens=2)
    rig.step()
    assert follower not in {step.sequence_id for step in rig.plans[-1].steps}
    rig.abort(leader)
    rig.run()
    assert rig.outputs[follower] == reference(prompt, 2)
    assert rig.cached[follower] == 8, "what the leader had computed is used"


def test_many_that_wait_for_one_prefix_keep_their_order() -> None:
    rig = Rig(max_step_tokens=8, max_running=4)
    prompt = list(range(40))
    for _ in range(MAX_DEFERRED + 10):
        rig.submit(prompt, max_tokens=1)
    rig.run()
    assert list(rig.finished) == sorted(rig.finished)


def test_the_oldest_is_never_preempted_and_nothing_thrashes() -> None:
    rig = Rig(num_blocks=5, admission=OPTIMISTIC)
    old, young = rig.submit([1, 2, 3, 4], max_tokens=16), rig.submit([5, 6, 7, 8], max_tokens=16)
    rig.run(most_steps=80)
    assert rig.sequences[old].generation == 0
    assert rig.outputs[old] == reference([1, 2, 3, 4], 16)
    assert rig.outputs[young] == reference([5, 6, 7, 8], 16)


def test_an_end_token_ends_a_sequence_but_not_before_min_tokens() -> None:
    free = reference([1, 2, 3], 12)
    end = free[4]
    first = free.index(end)
    rig = Rig()
    rig.submit([1, 2, 3], 12, end_token_ids=frozenset({end}))
    rig.run()
    assert rig.outputs[1] == free[: first + 1]
    assert rig.finished[1] is Finish.STOP


def test_a_ledger_from_another_worker_continues_like_a_local_one() -> None:
    whole = reference([9, 8, 7, 6, 5], 12)
    for length in range(12):
        rig = Rig()
        rig.submit([9, 8, 7, 6, 5], 12, output=whole[:length])
        rig.run()
        assert rig.outputs[1] == whole


def test_a_ledger_fills_and_uses_the_cache() -> None:
    rig = Rig()
    whole = reference([9, 8, 7, 6, 5], 12)
    for _ in range(2):
        rig.submit([9, 8, 7, 6, 5], 12, output=whole[:7])
        rig.run()
    assert rig.cached == {1: 0, 2: 5}, "8 tokens were found; those of the prompt are reported"
    assert rig.tokens_computed == 2 * (12 + 4) - 8
    assert rig.outputs[2] == whole


def test_prompt_logprobs_compute_the_prompt_in_full() -> None:
    rig = Rig()
    prompt = list(range(12))
    for _ in range(2):
        rig.submit(prompt, max_tokens=1, prompt_logprobs=0)
        rig.run()
    assert rig.cached == {1: 0, 2: 0}
    assert rig.tokens_computed == 24
