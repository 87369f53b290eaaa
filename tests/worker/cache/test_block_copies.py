"""Copies of blocks that end late, out of order or not at all never change what a sequence generates."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.late_copies import CopyingRig, chain_of
from tests.worker.rig import Rig
from trunkline_worker.cache.prefix_tree import Node
from trunkline_worker.step.plan import CopyEnd


@settings(max_examples=30, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=40), min_size=2, max_size=16),
    chunk=st.integers(1, 40),
    num_blocks=st.integers(14, 60),
    run_ahead=st.integers(0, 2),
    seed=st.integers(0, 1 << 20),
)
def test_outputs_are_those_without_copies(
    prompts: list[list[int]], chunk: int, num_blocks: int, run_ahead: int, seed: int
) -> None:
    alone: list[list[int]] = []
    for prompt in prompts:
        rig = Rig(num_blocks=128, max_step_tokens=1024)
        rig.submit(prompt, max_tokens=12)
        rig.run()
        alone.append(rig.outputs[1])
    copying = CopyingRig(num_blocks=num_blocks, max_step_tokens=chunk, run_ahead=run_ahead, seed=seed)
    for prompt in prompts:
        copying.submit(prompt, max_tokens=12)
    copying.run()
    assert list(copying.outputs.values()) == alone
    assert copying.blocks.num_live == 0


def test_many_copies_end_late_and_some_fail() -> None:
    """What the lives above are worth: sequences do read copies."""
    rig = CopyingRig(num_blocks=40, max_step_tokens=32, seed=3)
    read = 0
    for n in range(300):
        rig.submit([(n * k) % 3 % 2 for k in range(1, 12 + n % 9)], max_tokens=1 + n % 7)
        rig.step()
        read += sum(block in copied(rig) for sequence in rig.scheduler.running for block in sequence.block_table)
    rig.run()
    assert rig.num_copies > 300
    assert rig.late.num_late > 100
    assert rig.late.num_failed > 30
    assert read > 100


def copied(rig: CopyingRig) -> set[int]:
    """Blocks that copies have written, as long as they are published."""
    return {copy.target.block for plan in rig.plans for copy in plan.copies if rig.blocks._node[copy.target.block]}


def cached(rig: CopyingRig, num_blocks: int, token: int = 7) -> list[Node]:
    """The nodes of a cached prompt."""
    rig.submit([token] * (num_blocks * 4), max_tokens=1)
    rig.run()
    return chain_of(max(rig.tree.nodes.values(), key=lambda node: (node.packed[0] == token, node.depth)))


def quiet_rig(**options: object) -> CopyingRig:
    """Nothing is copied but what a test begins. Copies end when it says so."""
    return CopyingRig(copying=0.0, failing=0.0, **options)  # type: ignore[arg-type]


def begun(rig: CopyingRig, chain: list[Node], first: int) -> list[int]:
    """Begins copies, and returns their ids."""
    assert rig.copy(chain, first)
    return [copy.copy_id for copy in rig.scheduler.copies.take_planned()]


def end(rig: CopyingRig, copy_id: int, *, arrived: bool = True) -> None:
    rig.scheduler.copies.end([CopyEnd(copy_id, arrived)])
    rig.scheduler.check_integrity()


def test_a_target_is_published_when_its_copy_has_arrived_and_not_before() -> None:
    rig = quiet_rig()
    chain = cached(rig, 2)
    first, second = begun(rig, chain, 0)
    assert [len(node.copies) for node in chain] == [1, 1]
    end(rig, second)
    assert [len(node.copies) for node in chain] == [1, 2]
    end(rig, first)
    assert [len(node.copies) for node in chain] == [2, 2]
    assert (rig.blocks.num_live, rig.blocks.num_cached) == (0, 4)


def test_the_target_of_a_failed_copy_is_free() -> None:
    rig = quiet_rig()
    chain = cached(rig, 2)
    first, second = begun(rig, chain, 0)
    end(rig, first, arrived=False)
    assert rig.blocks.num_live == 3
    end(rig, second)
    assert [len(node.copies) for node in chain] == [1, 2]
    assert (rig.blocks.num_live, rig.blocks.num_cached) == (0, 3)


def test_neither_sources_nor_targets_are_taken_while_copies_are_under_way() -> None:
    rig = quiet_rig(num_blocks=7)
    chain = cached(rig, 3)
    first, second = begun(rig, chain, 1)  # block 0 of the chain is pinned as well: its children must not outlive it
    assert not rig.scheduler.copies.can_begin(chain, 0), "it would take three more"
    assert rig.blocks.num_available == 2
    other = rig.submit([3] * 7, max_tokens=2)
    rig.step()
    assert rig.blocks.num_available == 0
    assert not set(rig.sequences[other].block_table) & {node.copies[0] for node in chain}
    end(rig, first)
    assert rig.blocks.num_available == 0, "the chain is pinned until the last of its copies has ended"
    end(rig, second)
    assert rig.blocks.num_available == 5


def test_a_sequence_that_needs_the_blocks_of_copies_waits_for_them() -> None:
    """No step can be computed, so a plan without entries waits for a copy."""
    rig = quiet_rig(num_blocks=6)
    chain = cached(rig, 2)
    rig.copy(chain, 0)
    only = rig.submit([5] * 20, max_tokens=4)
    rig.step()
    assert not rig.plans[-1].steps
    rig.run()
    assert len(rig.outputs[only]) == 4


def test_copies_that_are_left_when_all_sequences_have_ended_end_too() -> None:
    rig = quiet_rig()
    rig.copy(cached(rig, 3), 0)
    assert rig.scheduler.has_work
    rig.run()
    assert not rig.scheduler.has_work
    assert not rig.plans[-1].steps


def test_check_integrity_notices_a_block_that_is_published_early() -> None:
    rig = quiet_rig()
    chain = cached(rig, 1)
    begun(rig, chain, 0)
    (target,) = rig.blocks._loading
    rig.blocks._node[target] = chain[0]
    with pytest.raises(AssertionError, match="published early"):
        rig.scheduler.check_integrity()
