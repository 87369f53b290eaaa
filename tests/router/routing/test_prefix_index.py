"""The fleet's index against a brute-force model, and at the size of a fleet."""

import sys
import time
import tracemalloc
from _collections_abc import dict_items
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.router.integrity import check_index
from trunkline.block_hash import prompt_hashes, root_hash
from trunkline_router.routing.prefix_index import SHARDS, PrefixIndex, WorkerBlocks, keys_of

# Chains that share prefixes: a tree of blocks, each named by its path.
PATHS = ["".join(branch) for depth in range(1, 7) for branch in (format(n, f"0{depth}b") for n in range(2**depth))]
KEYS = {path: Random(path).getrandbits(60) for path in PATHS}


def chain(path: str) -> list[int]:
    return [KEYS[path[:end]] for end in range(1, len(path) + 1)]


class IndexLife(RuleBasedStateMachine):
    """Workers come and go, hold prefixes and drop them from their ends, start anew; requests expect."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.truth: dict[int, set[str]] = {}  # slot → paths held
        self.expected: list[tuple[int, str]] = []

    def pick(self, number: int) -> int:
        return sorted(self.truth)[number % len(self.truth)]

    @precondition(lambda self: len(self.truth) < 6)
    @rule()
    def joins(self) -> None:
        self.truth[self.index.attach()] = set()

    @precondition(lambda self: self.truth)
    @rule(number=st.integers(0, 9), path=st.sampled_from(PATHS))
    def stores(self, number: int, path: str) -> None:
        slot = self.pick(number)
        self.index.store(slot, chain(path))
        self.truth[slot] |= {path[:end] for end in range(1, len(path) + 1)}

    @precondition(lambda self: self.truth)
    @rule(number=st.integers(0, 9), path=st.sampled_from(PATHS))
    def removes(self, number: int, path: str) -> None:
        slot = self.pick(number)
        gone = sorted((held for held in self.truth[slot] if held.startswith(path)), key=len, reverse=True)
        self.index.remove(slot, [KEYS[held] for held in gone] + [12345])
        self.truth[slot] -= set(gone)

    @precondition(lambda self: self.truth)
    @rule(number=st.integers(0, 9), again=st.booleans())
    def is_lost(self, number: int, again: bool) -> None:
        slot = self.pick(number)
        for request in [r for r in self.expected if r[0] == slot]:
            self.index.stop_expecting(slot, chain(request[1]))
            self.expected.remove(request)
        del self.truth[slot]
        self.index.detach(slot)
        if again:  # a gap, or a new epoch: it is a new worker to the index
            self.joins()

    @precondition(lambda self: self.truth)
    @rule(number=st.integers(0, 9), path=st.sampled_from(PATHS))
    def is_sent_a_request(self, number: int, path: str) -> None:
        slot = self.pick(number)
        self.index.expect(slot, chain(path))
        self.expected.append((slot, path))

    @precondition(lambda self: self.expected)
    @rule(number=st.integers(0, 99))
    def request_ends(self, number: int) -> None:
        slot, path = self.expected.pop(number % len(self.expected))
        self.index.stop_expecting(slot, chain(path))

    @rule(slices=st.sampled_from([1, 100, SHARDS]))
    def is_swept(self, slices: int) -> None:
        for _ in range(slices):
            self.index.sweep()

    @invariant()
    def answers_as_the_model(self) -> None:
        check_index(self.index)
        holds = {slot: set(held) for slot, held in self.truth.items()}
        for slot, path in self.expected:
            holds[slot] |= {path[:end] for end in range(1, len(path) + 1)}
        among = sum(1 << slot for slot in self.truth)
        for path in PATHS[::9]:
            found: dict[int, int] = {}
            for count, mask in self.index.match(chain(path), among):
                for slot in self.truth:
                    if mask >> slot & 1:
                        assert slot not in found, "a worker is in the answer twice"
                        found[slot] = count
            assert found == {
                slot: next((n for n in range(len(path)) if path[: n + 1] not in held), len(path))
                for slot, held in holds.items()
            }


TestIndexLife = IndexLife.TestCase
TestIndexLife.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_keys_are_the_same_one_by_one_and_in_bulk() -> None:
    digests = prompt_hashes(root_hash("weights"), range(640), 16)
    assert keys_of(b"".join(digests)) == [int.from_bytes(digest) >> 68 for digest in digests], "their first 60 bits"
    assert keys_of(b"") == []


def random_keys(count: int, seed: int = 1) -> list[int]:
    draw = Random(seed)
    return [draw.getrandbits(60) for _ in range(count)]


def test_an_indexed_block_takes_at_most_150_bytes() -> None:
    count = 200_000
    tracemalloc.start()
    try:
        index = PrefixIndex()
        slots = [index.attach() for _ in range(64)]
        before = tracemalloc.get_traced_memory()[0]
        draw = Random(1)
        for start in range(0, count, 4096):
            blob = draw.randbytes(16 * min(4096, count - start))
            index.store(draw.choice(slots), keys_of(blob))
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert used / count <= 150


class ReadCounter(dict[int, int]):
    """Counts the entries that going through it reads."""

    num_read = 0

    def items(self) -> "dict_items[int, int]":
        self.num_read += len(self)
        return super().items()


def test_pitfall_18_a_lost_worker_is_forgotten_at_once_and_freed_by_slices() -> None:
    index = PrefixIndex()
    lost, other = index.attach(), index.attach()
    keys = random_keys(100_000)
    index.store(lost, keys)
    index.store(other, keys[:10])
    index.detach(lost)
    fresh = index.attach()
    assert fresh not in (lost, other), "its bit is still in the tables"
    assert index.match(keys[:10], 1 << fresh | 1 << other) in (
        [(0, 1 << fresh), (10, 1 << other)],
        [(10, 1 << other), (0, 1 << fresh)],
    )
    index._shards = [ReadCounter(shard) for shard in index._shards]
    reads, slices, more = 0, list[int](), True
    while more:
        more = index.sweep()
        slices.append(sum(shard.num_read for shard in index._shards if isinstance(shard, ReadCounter)) - reads)
        reads += slices[-1]
    assert reads == len(keys)
    assert max(slices) <= 3 * len(keys) / SHARDS, "a slice is short"
    check_index(index)
    assert index.attach() == lost


@pytest.mark.parametrize("workers", [64, 1000])
def test_one_search_serves_the_fleet(workers: int) -> None:
    chain = keys_of(b"".join(prompt_hashes(root_hash("weights"), range(8192), 16)))
    index = PrefixIndex()
    slots = [index.attach() for _ in range(workers)]
    for number, slot in enumerate(slots):
        index.store(slot, chain[: number % 9 * 60])
        index.store(slot, random_keys(50, seed=number))
    among, best_s = (1 << workers) - 1, sys.float_info.max
    for _ in range(20):
        started_s = time.thread_time()
        found = index.match(chain, among)
        best_s = min(best_s, time.thread_time() - started_s)
    assert sorted(count for count, _ in found) == [number * 60 for number in range(9)]
    assert best_s < 2e-3


def test_what_is_expected_outlives_a_new_snapshot_and_not_the_worker() -> None:
    index = PrefixIndex()
    blocks, other = WorkerBlocks(index), WorkerBlocks(index)

    def held(of: WorkerBlocks) -> int:
        return dict((bit, count) for count, bits in index.match([1, 2, 3], of.bit) for bit in (bits,))[of.bit]

    blocks.store([1, 2, 3])
    blocks.expect([1, 2])
    blocks.expect([1])
    blocks.clear()
    assert (len(blocks), held(blocks), held(other)) == (0, 2, 0)
    blocks.stop_expecting([1])
    assert held(blocks) == 2
    blocks.close()
    blocks.stop_expecting([1, 2])  # a request that ends after its worker
    blocks.expect([1, 2])  # one that was on its way to it
    successor = WorkerBlocks(index)
    assert held(successor) == 0
    while index.sweep():
        pass
    check_index(index)
