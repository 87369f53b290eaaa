"""The tree of shared prefixes."""

import tracemalloc
from array import array
from random import Random
from typing import Any

import pytest

from trunkline_router.routing.hot_prefixes import (
    HALF_LIFE_S,
    MOST_KEYS,
    MOST_NODES,
    HotPrefixes,
    Prefix,
    common_length,
)
from trunkline_router.routing.route_request import MOST_BLOCKS, MOST_NOTED, NotedPrompts

BLOCK = 16


class Prompts(HotPrefixes):
    """With the prompts that are noted for it."""

    def __init__(self) -> None:
        noted = NotedPrompts()
        super().__init__(noted)
        self.note = noted.note


def tree(siblings: list[Prefix]) -> list[Any]:
    """(blocks, requests, children) of shared prefixes."""
    shared = (node for node in siblings if node.is_shared)
    return sorted((len(node.keys), node.requests, tree(list(node.children.values()))) for node in shared)


def noted(*chains: list[int], tenant: str = "acme") -> "Prompts":
    hot = Prompts()
    for chain in chains:
        hot.note(tenant, BLOCK, chain)
    hot.fold(0.0)
    return hot


def test_prompts_that_begin_alike_meet_where_they_part() -> None:
    hot = noted([1, 2, 3, 4, 5], [1, 2, 3, 7], [1, 2, 3, 7, 8], [1, 2], [9, 9], [1, 2, 3, 4, 5])
    assert tree(hot.roots("acme")) == [(2, 5, [(1, 4, [(1, 2, []), (2, 2, [])])])]


def test_a_prefix_of_one_request_is_not_shared_and_tenants_never_meet() -> None:
    hot = Prompts()
    hot.note("acme", BLOCK, [1, 2, 3])
    hot.note("other", BLOCK, [1, 2, 3])
    hot.fold(0.0)
    assert tree(hot.roots("acme")) == tree(hot.roots("other")) == []
    assert hot.roots("nobody") == []


def test_prompts_that_wait_to_be_folded_hold_little_memory() -> None:
    hot = Prompts()
    tracemalloc.start()
    try:
        for number in range(2 * MOST_NOTED):
            hot.note("acme", BLOCK, [number] * (4 * MOST_BLOCKS))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 1.1 * MOST_NOTED * MOST_BLOCKS * 8


def test_hits_count_half_after_the_half_life_and_unused_prefixes_are_forgotten() -> None:
    hot = noted(*[[1, 2]] * 8)
    (root,) = hot.roots("acme")
    assert root.hits_at(0.0) == 8.0
    assert root.hits_at(HALF_LIFE_S) == 4.0
    hot.note("acme", BLOCK, [1, 2])
    hot.fold(HALF_LIFE_S)
    assert root.hits_at(HALF_LIFE_S) == 5.0
    hot.note("other", BLOCK, [5])
    hot.fold(9 * HALF_LIFE_S)
    assert (hot.roots("acme"), list(hot.tenants()), hot.num_nodes, hot.num_keys) == ([], ["other"], 1, 1)


def test_of_a_flood_the_latest_stand_for_all() -> None:
    hot = noted(*[[1, 2]] * (4 * MOST_NOTED))
    (root,) = hot.roots("acme")
    assert root.requests == MOST_NOTED
    assert root.hits_at(0.0) == pytest.approx(4 * MOST_NOTED)


@pytest.mark.slow
def test_memory_is_bounded_whatever_the_prompts_and_the_hottest_stay() -> None:
    rng, hot = Random(1), Prompts()
    for now_s in range(60):
        for _ in range(MOST_NOTED // 2):
            hot.note("noisy", BLOCK, [rng.getrandbits(60) for _ in range(rng.choice([1, 40, 3000]))])
            hot.note("acme", BLOCK, [1, 2, rng.getrandbits(60)])
        hot.fold(float(now_s))
        assert hot.num_nodes <= MOST_NODES
        assert hot.num_keys <= MOST_KEYS
        assert all(len(node.keys) <= MOST_BLOCKS for node in hot.roots("noisy"))
    assert any(len(node.keys) == 2 and node.requests > 1000 for node in hot.roots("acme"))


def test_prompts_that_each_extend_the_one_before_make_a_deep_tree() -> None:
    hot = Prompts()
    for length in range(1, MOST_BLOCKS, 8):
        hot.note("acme", BLOCK, list(range(length)))
        hot.fold(0.0)
    for length in range(1, MOST_BLOCKS, 8):
        hot.note("acme", BLOCK, list(range(length)))
        hot.fold(1.0)
    depth, siblings = 0, hot.roots("acme")
    while siblings:
        (node,) = siblings
        depth, siblings = depth + 1, list(node.children.values())
    assert depth == 256


@pytest.mark.parametrize("length", range(6))
def test_a_common_length_is_exact(length: int) -> None:
    one = array("Q", range(5))
    for other in (array("Q", [*range(length), 99, 98]), array("Q", range(length))):
        assert common_length(one, other) == common_length(other, one) == min(5, length)
