"""The KV pool and the prefix tree."""

import pytest

from tests.worker.rig import Rig
from trunkline.block_hash import pack_tokens
from trunkline_worker.cache.blocks import FreeList
from trunkline_worker.cache.prefix_tree import PrefixTree, Removed, Stored


def test_the_free_list_keeps_its_order_through_unlinking_in_the_middle() -> None:
    free = FreeList(5)
    free.unlink(2)
    free.push_back(2)
    free.unlink(0)
    free.push_front(0)
    assert list(free) == [0, 1, 3, 4, 2]
    assert [free.pop_front() for _ in range(5)] == [0, 1, 3, 4, 2]
    assert free.size == 0


def test_a_node_is_found_only_under_its_own_parent_and_with_its_own_tokens() -> None:
    tree = PrefixTree("model", 2, hash_block=lambda parent, tokens: b"same")
    one, other = tree.root(b""), tree.root(b"salt")
    tokens = pack_tokens((1, 2))
    node = tree.add_copy(one, tokens, b"same", block=0)
    assert tree.follow(one, [tokens], [b"same"]) == [node]
    assert tree.follow(one, [pack_tokens((1, 3))], [b"same"]) == []
    assert tree.follow(other, [tokens], [b"same"]) == []
    assert tree.add_copy(other, tokens, b"same", block=1) is None, "the digest is taken"


def test_events_fire_with_the_first_copy_and_the_last() -> None:
    tree = PrefixTree("model", 2)
    root = tree.root(b"")
    tokens = pack_tokens((1, 2))
    digest = tree.digest(root.digest, tokens)
    node = tree.add_copy(root, tokens, digest, block=0)
    assert node is not None
    tree.add_copy(root, tokens, digest, block=1)
    assert tree.take_changes() == [Stored(digest, root.digest, depth=0)]
    tree.remove_copy(node, 0)
    assert tree.take_changes() == []
    tree.remove_copy(node, 1)
    assert tree.take_changes() == [Removed(digest)]


def test_freed_blocks_are_taken_least_recently_used_first_and_a_tail_before_its_head() -> None:
    rig = Rig(num_blocks=8)
    rig.submit([1] * 8, max_tokens=1)
    rig.run()
    rig.submit([2] * 8, max_tokens=1)
    rig.run()
    rig.tree.take_changes()
    rig.submit([3] * 20, max_tokens=1)  # 5 blocks: 4 anonymous ones, then the oldest cached one
    rig.run()
    removed = [change for change in rig.tree.take_changes() if isinstance(change, Removed)]
    assert len(removed) == 1
    ones = rig.sequences[1].digests
    assert removed[0].digest == ones[1], "the tail of the older sequence goes first"
    again = rig.submit([1] * 8, max_tokens=1)
    rig.run()
    assert rig.cached[again] == 4


def test_a_cached_prefix_is_shared_and_never_written() -> None:
    rig = Rig()
    prompt = list(range(100, 116))
    first = rig.submit(prompt, max_tokens=4)
    rig.run()
    second = rig.submit([*prompt, 7], max_tokens=4)
    third = rig.submit([*prompt, 9], max_tokens=4)
    rig.step()
    tables = [rig.sequences[n].block_table for n in (second, third)]
    assert tables[0][:4] == tables[1][:4]
    assert not set(tables[0][4:]) & set(tables[1][4:])
    rig.run()
    assert rig.cached == {first: 0, second: 16, third: 16}


def test_salts_do_not_share() -> None:
    rig = Rig()
    prompt = list(range(100, 117))
    for salt in (b"", b"a", b"b", b"a"):
        rig.submit(prompt, max_tokens=1, salt=salt)
        rig.run()
    assert list(rig.cached.values()) == [0, 0, 0, 16]


def test_check_integrity_notices_a_lost_block() -> None:
    rig = Rig()
    rig.submit([1, 2, 3], max_tokens=4)
    rig.step()
    rig.sequences[1].block_table = []
    with pytest.raises(AssertionError, match="counted"):
        rig.scheduler.check_integrity()
