"""What a router knows of its workers' caches against a model of sets, whatever happens: see FollowedCaches."""

import asyncio
from collections.abc import Iterable, Iterator
from random import Random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.router.integrity import check_index
from trunkline.block_hash import HASH_BYTES
from trunkline.v1.worker_pb2 import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    CacheEvent,
    CacheSnapshot,
    CacheTier,
    WatchCacheResponse,
)
from trunkline_bench.simulation.fleet.router import Follower
from trunkline_router.routing import prefix_index
from trunkline_router.routing.prefix_index import PrefixIndex, WorkerBlocks, keys_of
from trunkline_router.workers.cache_follower import WatchBroken
from trunkline_worker.front import cache_mirror
from trunkline_worker.front.cache_mirror import CacheMirror

# A tree of blocks: each is named by its path, whose beginnings are the blocks before it.
MOST_BLOCKS = 7
PATHS = [format(n, f"0{depth}b") for depth in range(1, MOST_BLOCKS + 1) for n in range(2**depth)]
DIGESTS = {path: Random(path).randbytes(HASH_BYTES) for path in PATHS}
PATH_OF = {digest: path for path, digest in DIGESTS.items()}
MOST_WORKERS = 4
PROMPTS_PER_CHECK = 12

paths = st.text("01", min_size=1, max_size=MOST_BLOCKS)
numbers = st.integers(0, 99)
changes = st.tuples(st.sampled_from(["stores", "stores", "stores", "removes", "removes", "clears"]), paths)
fates = st.sampled_from(["runs on", "is cached", "is cached, ends", "ends"])
faults = st.sampled_from(["is lost", "comes twice", "comes in a snapshot", "breaks the stream"])
several_steps = st.lists(st.lists(changes, min_size=1, max_size=3), min_size=1, max_size=4)


def blocks_of(path: str) -> list[str]:
    return [path[:end] for end in range(1, len(path) + 1)]


def digests_of(blocks: Iterable[str]) -> bytes:
    return b"".join(DIGESTS[path] for path in blocks)


CHAINS = {path: keys_of(digests_of(blocks_of(path))) for path in PATHS}


def leading(path: str, held: set[str]) -> int:
    return next((n for n in range(len(path)) if path[: n + 1] not in held), len(path))


class Worker:
    """A prefix cache, and the real mirror of it."""

    def __init__(self, epoch: int) -> None:
        self.mirror = CacheMirror(epoch)
        self.held: set[str] = set()
        self.held_at: dict[int, frozenset[str]] = {0: frozenset()}  # by sequence

    def step(self, changes: Iterable[tuple[str, str]]) -> None:
        """What a step of its engine stores at the ends of chains, removes from there, or clears."""
        events = [event for kind, path in changes if (event := self._change(kind, path)) is not None]
        self.mirror.apply(events)
        self.held_at[self.mirror.sequence] = frozenset(self.held)

    def _change(self, kind: str, path: str) -> CacheEvent | None:
        if kind == "clears":
            self.held.clear()
            return CacheEvent(cleared=CacheCleared())
        if kind == "stores":
            fresh = [block for block in blocks_of(path) if block not in self.held]
            self.held.update(fresh)
            depth = len(path) - len(fresh)
            return CacheEvent(stored=BlocksStored(block_hashes=digests_of(fresh), depth=depth)) if fresh else None
        gone = sorted((block for block in self.held if block.startswith(path)), key=len, reverse=True)
        self.held.difference_update(gone)
        return CacheEvent(removed=BlocksRemoved(block_hashes=digests_of(gone))) if gone else None


BELOW = (CacheTier.CACHE_TIER_HOST, CacheTier.CACHE_TIER_DISK)
BLOCKS = digests_of(PATHS)
CHANGES_BELOW = [
    CacheEvent(tier=tier, **change)
    for tier in BELOW
    for change in (
        {"stored": BlocksStored(block_hashes=BLOCKS)},
        {"removed": BlocksRemoved(block_hashes=BLOCKS)},
        {"cleared": CacheCleared()},
    )
]


def with_lower_tiers(item: WatchCacheResponse, rng: Random) -> WatchCacheResponse:
    """The same events among those of tiers below the device, where all blocks come and go."""
    mixed = WatchCacheResponse()
    mixed.CopyFrom(item)
    if item.WhichOneof("item") == "events":
        events = list(item.events.events)
        for change in rng.sample(CHANGES_BELOW, rng.randrange(3)):
            events.insert(rng.randint(0, len(events)), change)
        mixed.events.ClearField("events")
        mixed.events.events.extend(events)
    return mixed


class Watch:
    """A WatchCache call; see service.py of the worker."""

    def __init__(self, loop: asyncio.AbstractEventLoop, mirror: CacheMirror) -> None:
        self._loop, self._mirror = loop, mirror
        self._subscription = mirror.subscribe(stride=1)
        self._items: Any = self._subscription.items()
        self._next: asyncio.Task[WatchCacheResponse] | None = None

    def take(self) -> WatchCacheResponse | None:
        """The next item; None where none is there yet."""

        async def next_item() -> WatchCacheResponse:
            item: WatchCacheResponse = await anext(self._items)
            return item

        if self._next is None:
            self._next = self._loop.create_task(next_item())
        self._loop.run_until_complete(asyncio.sleep(0))  # it never waits but for the worker
        if not self._next.done():
            return None
        item, self._next = self._next.result(), None
        return item

    def end(self) -> None:
        if self._next is not None:
            self._next.cancel()
            self._loop.run_until_complete(asyncio.wait((self._next,)))
        self._loop.run_until_complete(self._items.aclose())
        self._mirror.unsubscribe(self._subscription)


class Connection:
    """What a router has of a worker as long as they are connected, and beside it the model: plain sets."""

    def __init__(self, loop: asyncio.AbstractEventLoop, index: PrefixIndex, worker: Worker) -> None:
        self._loop = loop
        self.worker = worker
        self.epoch = worker.mirror.epoch
        self.blocks = WorkerBlocks(index)
        self.told: set[str] = set()  # by the worker
        self.sent: list[str] = []  # prompts of requests that run
        self.reports_count = True
        self.draw = Random(self.epoch)
        self.watch = Watch(loop, worker.mirror)
        self.last_events: WatchCacheResponse | None = None
        self._follow()

    def _follow(self) -> None:
        self.follower = Follower(self.blocks, self.epoch)
        self.at: int | None = None  # sequence up to which it was told everything
        self.has_missed = False  # events, and cannot know before the next ones

    def resubscribe(self) -> None:
        self.watch.end()
        self.watch = Watch(self._loop, self.worker.mirror)
        self._follow()

    def close(self) -> None:
        self.watch.end()
        self.blocks.close()

    def deliver(self, item: WatchCacheResponse) -> None:
        """As a WorkerLink does. Raises WatchBroken."""
        if item.WhichOneof("item") == "load":
            return
        if item.epoch != self.epoch:
            self.follower.take(item)
            raise AssertionError("another life of the worker was taken for this one")
        is_in_order = True
        if item.WhichOneof("item") == "snapshot":
            self.has_missed = False
            if item.snapshot.first:
                self.told.clear()
            joined = item.snapshot.block_hashes
            self.told |= {PATH_OF[joined[at : at + HASH_BYTES]] for at in range(0, len(joined), HASH_BYTES)}
            self.at = item.sequence if item.snapshot.last else None
            assert not item.snapshot.last or self.told == self.worker.held_at[item.sequence], "of another moment"
        else:
            self.last_events = item
            is_in_order = self.at is not None and item.sequence == self.at + 1
            if is_in_order:
                self.told, self.at = set(self.worker.held_at[item.sequence]), item.sequence
        assert self.follower.take(with_lower_tiers(item, self.draw)) == is_in_order
        assert self.follower.synced == (self.at is not None)
        if not is_in_order:
            self.resubscribe()

    @property
    def expected(self) -> set[str]:
        return {block for path in self.sent for block in blocks_of(path)}

    @property
    def counts(self) -> set[str]:
        """What the router should reckon with."""
        return self.expected | self.told if self.reports_count else self.expected


class FollowedCaches(RuleBasedStateMachine):
    """Workers come, compute, evict, clear, start anew and are lost; their streams are late, lose events, repeat them
    and break off, in the midst of a snapshot too; requests run, whose prompts are cached there or never; workers'
    reports are distrusted and trusted; what lost ones held is swept out in slices, or not yet."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.connections: list[Connection] = []
        self.requests: list[tuple[Connection, str]] = []
        self.num_epochs = 0
        self.draw = Random(0)

    @initialize(
        num_shards=st.sampled_from([1, 3, 16, 64]),
        part_blocks=st.integers(1, 8),
        most_pending=st.integers(1, 6),
    )
    def starts(self, num_shards: int, part_blocks: int, most_pending: int) -> None:
        """Limits that a handful of blocks reaches; the test puts the real ones back."""
        prefix_index.SHARDS = num_shards
        cache_mirror.SNAPSHOT_CHUNK_BLOCKS = part_blocks
        cache_mirror.MAX_PENDING_ITEMS = most_pending
        self.index = PrefixIndex()

    def teardown(self) -> None:
        for connection in self.connections:
            connection.watch.end()
        self.loop.close()

    def pick(self, number: int) -> Connection:
        return self.connections[number % len(self.connections)]

    def connect(self, worker: Worker) -> None:
        self.connections.append(Connection(self.loop, self.index, worker))

    def lose(self, connection: Connection) -> None:
        connection.close()
        self.connections.remove(connection)

    def deliver(self, connection: Connection, item: WatchCacheResponse) -> None:
        try:
            connection.deliver(item)
        except WatchBroken:
            assert item.epoch != connection.epoch
            self.lose(connection)
            self.connect(connection.worker)

    def hear(self, connection: Connection, most: int) -> None:
        for _ in range(most):
            if connection not in self.connections or (item := connection.watch.take()) is None:
                return
            self.deliver(connection, item)

    # Workers and their streams

    @precondition(lambda self: len(self.connections) < MOST_WORKERS)
    @rule()
    def comes(self) -> None:
        self.num_epochs += 1
        self.connect(Worker(self.num_epochs))

    @precondition(lambda self: self.connections)
    @rule(number=numbers, steps=several_steps, heard=st.sampled_from([0, 1, 2, 4, 99]))
    def makes_steps(self, number: int, steps: list[list[tuple[str, str]]], heard: int) -> None:
        """Of which the router hears soon, or later, as of other things."""
        connection = self.pick(number)
        for changes in steps:
            connection.worker.step(changes)
        self.hear(connection, heard)

    @precondition(lambda self: self.connections)
    @rule()
    def all_are_heard_out(self) -> None:
        for connection in list(self.connections):
            worker = connection.worker
            self.hear(connection, 10_000)
            if connection in self.connections and not connection.has_missed:
                assert connection.told == worker.held, "nothing is amiss, and it does not know"

    @precondition(lambda self: self.connections)
    @rule(
        number=numbers,
        change=changes,
        fault=faults,
    )
    def an_event(self, number: int, change: tuple[str, str], fault: str) -> None:
        connection = self.pick(number)
        connection.worker.step([change])
        if fault in ("comes in a snapshot", "breaks the stream"):
            connection.resubscribe()
        if fault == "comes in a snapshot":
            self.hear(connection, 1)
        again = connection.last_events
        if fault.startswith("comes") and again is not None and connection in self.connections:
            connection.deliver(again)
        while connection in self.connections and (item := connection.watch.take()) is not None:
            if fault == "is lost" and item.WhichOneof("item") == "events":
                connection.has_missed = True
                break
            self.deliver(connection, item)

    @precondition(lambda self: len(self.connections) > 1)
    @rule(number=numbers, what=st.sampled_from(["starts anew", "was cut off", "goes"]))
    def a_worker(self, number: int, what: str) -> None:
        connection = self.pick(number)
        if what == "starts anew":  # the router has not heard of it yet
            self.num_epochs += 1
            connection.worker = Worker(self.num_epochs)
            connection.resubscribe()
            return
        self.lose(connection)
        if what == "was cut off":
            self.connect(connection.worker)

    # Requests, also such as outlive their worker's connection

    @precondition(lambda self: self.connections)
    @rule(number=numbers, prompts=st.lists(st.tuples(paths, fates), min_size=1, max_size=4))
    def is_sent_requests(self, number: int, prompts: list[tuple[str, str]]) -> None:
        connection = self.pick(number)
        for path, fate in prompts:
            connection.blocks.expect(CHAINS[path])
            connection.sent.append(path)
            self.requests.append((connection, path))
            self.go_on(len(self.requests) - 1, fate)

    @precondition(lambda self: self.requests)
    @rule(number=numbers, fate=fates)
    def a_request_goes_on(self, number: int, fate: str) -> None:
        self.go_on(number % len(self.requests), fate)

    def go_on(self, at: int, fate: str) -> None:
        connection, path = self.requests[at]
        if "is cached" in fate:
            connection.worker.step([("stores", path)])
        if fate.endswith("ends"):
            del self.requests[at]
            connection.blocks.stop_expecting(CHAINS[path])
            connection.sent.remove(path)

    @precondition(lambda self: self.connections)
    @rule(number=numbers)
    def its_reports_count_no_longer_or_again(self, number: int) -> None:
        connection = self.pick(number)
        connection.reports_count = not connection.reports_count
        connection.blocks.count_reports(count=connection.reports_count)

    # The index

    @rule(slices=st.integers(1, 70))
    def is_swept(self, slices: int) -> None:
        for _ in range(slices):
            self.index.sweep()

    @precondition(lambda self: len(self.connections) == MOST_WORKERS)
    @rule()
    def all_are_lost(self) -> None:
        """Nothing is left of them."""
        for connection in list(self.connections):
            self.lose(connection)
        while self.index.sweep():
            pass
        check_index(self.index)
        assert not any(self.index._shards)
        assert not self.index._expected
        assert not self.index._distrusted
        assert sorted(self.index._free) == list(range(self.index.num_slots))

    @invariant()
    def answers_as_the_model(self) -> None:
        check_index(self.index)
        bits = [connection.blocks.bit for connection in self.connections]
        assert len(set(bits)) == len(bits), "two workers have one slot"
        counts = [connection.counts for connection in self.connections]
        for connection in self.connections:
            assert len(connection.blocks) == len(connection.told)
            expected = {CHAINS[path][-1] for path in connection.expected}
            assert self.index._expecting[connection.blocks.slot].keys() == expected
        for path in self.draw.choices(PATHS, k=PROMPTS_PER_CHECK):
            found: dict[int, int] = {}
            for count, mask in self.index.match(CHAINS[path], sum(bits)):
                for bit in bits:
                    if mask & bit:
                        assert bit not in found, "a worker is in the answer twice"
                        found[bit] = count
            assert found == {bit: leading(path, held) for bit, held in zip(bits, counts, strict=True)}
            for connection in self.connections:
                assert connection.blocks.reported(CHAINS[path]) == leading(path, connection.told)


@pytest.fixture(autouse=True)
def limits() -> Iterator[None]:
    """Puts back what an example has changed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_index, "SHARDS", prefix_index.SHARDS)
        for name in ("SNAPSHOT_CHUNK_BLOCKS", "MAX_PENDING_ITEMS"):
            patch.setattr(cache_mirror, name, getattr(cache_mirror, name))
        yield


TestFollowedCaches = FollowedCaches.TestCase
TestFollowedCaches.settings = settings(max_examples=70, stateful_step_count=50, deadline=None)


class FollowedForLong(FollowedCaches):
    """The same, far longer."""


TestFollowedForLong = pytest.mark.slow(FollowedForLong.TestCase)
TestFollowedForLong.settings = settings(max_examples=200, stateful_step_count=120, deadline=None)


@pytest.mark.parametrize("change", CHANGES_BELOW, ids=lambda event: f"{event.WhichOneof('kind')} {event.tier}")
def test_what_happens_below_the_device_changes_nothing_that_is_known_of_the_device(change: CacheEvent) -> None:
    blocks, held = WorkerBlocks(PrefixIndex()), blocks_of("0101")
    follower = Follower(blocks, 1)
    lower = CacheSnapshot(block_hashes=BLOCKS, tier=change.tier, first=True)
    device = CacheSnapshot(block_hashes=digests_of(held), tier=CacheTier.CACHE_TIER_DEVICE)
    for snapshot in (lower, device, CacheSnapshot(block_hashes=BLOCKS, tier=change.tier, last=True)):
        assert follower.take(WatchCacheResponse(epoch=1, sequence=5, snapshot=snapshot))
    assert follower.synced
    item = WatchCacheResponse(epoch=1, sequence=6)
    item.events.events.append(change)
    assert follower.take(item)
    assert (len(blocks), blocks.reported(CHAINS["0101"])) == (4, 4)
    removed = CacheEvent(removed=BlocksRemoved(block_hashes=digests_of(held[2:])), tier=CacheTier.CACHE_TIER_DEVICE)
    item = WatchCacheResponse(epoch=1, sequence=7)
    item.events.events.append(removed)
    assert follower.take(item), "the change took its place in the sequence"
    assert (len(blocks), blocks.reported(CHAINS["0101"])) == (2, 2)
