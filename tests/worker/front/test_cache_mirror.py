"""What subscribers of a worker's cache are told."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from trunkline.status import OVERLOADED, RequestRefused
from trunkline.v1.worker_pb2 import BlocksRemoved, BlocksStored, CacheEvent, LoadSample, WatchCacheResponse
from trunkline_worker.front import cache_mirror
from trunkline_worker.front.cache_mirror import CacheMirror


def digest(n: int) -> bytes:
    return n.to_bytes(16, "big")


def stored(first: int, count: int) -> CacheEvent:
    return CacheEvent(stored=BlocksStored(block_hashes=b"".join(map(digest, range(first, first + count))), depth=first))


def removed(*numbers: int) -> CacheEvent:
    return CacheEvent(removed=BlocksRemoved(block_hashes=b"".join(map(digest, numbers))))


def numbers(joined: bytes) -> list[int]:
    return [int.from_bytes(joined[i : i + 16], "big") for i in range(0, len(joined), 16)]


async def next_item(items: AsyncIterator[WatchCacheResponse], kind: str) -> WatchCacheResponse:
    async with asyncio.timeout(60):
        while True:
            item = await anext(items)
            if item.WhichOneof("item") == kind:
                return item


async def test_a_late_subscriber_gets_a_snapshot_and_then_consecutive_events() -> None:
    mirror = CacheMirror(epoch=9)
    mirror.apply([stored(0, 5)])
    mirror.apply([removed(4)])
    items = mirror.subscribe(1).items()
    snapshot = await next_item(items, "snapshot")
    assert (snapshot.epoch, snapshot.sequence) == (9, 2)
    assert numbers(snapshot.snapshot.block_hashes) == [0, 1, 2, 3]
    mirror.apply([stored(4, 1)])
    mirror.apply([removed(4)])
    events = [await next_item(items, "events") for _ in range(2)]
    assert [item.sequence for item in events] == [3, 4]


async def test_a_snapshot_comes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_mirror, "SNAPSHOT_CHUNK_BLOCKS", 2)
    mirror = CacheMirror(epoch=1)
    mirror.apply([stored(0, 5)])
    parts = [item.snapshot for item in mirror.snapshot(1)]
    assert [(part.first, part.last) for part in parts] == [(True, False), (False, False), (False, True)]
    assert [n for part in parts for n in numbers(part.block_hashes)] == [0, 1, 2, 3, 4]


async def test_a_subscriber_that_falls_behind_gets_a_new_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_mirror, "MAX_PENDING_ITEMS", 3)
    mirror = CacheMirror(epoch=1)
    items = mirror.subscribe(1).items()
    await next_item(items, "snapshot")
    for n in range(5):
        mirror.apply([stored(n, 1)])
    again = await next_item(items, "snapshot")
    assert again.sequence == 5
    assert numbers(again.snapshot.block_hashes) == [0, 1, 2, 3, 4]
    mirror.apply([stored(5, 1)])
    assert (await next_item(items, "events")).sequence == 6


async def test_a_stride_thins_snapshots_and_events_alike() -> None:
    mirror = CacheMirror(epoch=1)
    mirror.apply([stored(0, 10)])
    items = mirror.subscribe(4).items()
    assert numbers((await next_item(items, "snapshot")).snapshot.block_hashes) == [3, 7]
    mirror.apply([stored(10, 7), removed(3, 4, 5)])
    item = (await next_item(items, "events")).events
    assert numbers(item.events[0].stored.block_hashes) == [11, 15]
    assert item.events[0].stored.depth == 11
    assert numbers(item.events[1].removed.block_hashes) == [3]
    mirror.apply([removed(4)])
    assert (await next_item(items, "events")).sequence == 3, "a step that leaves nothing still counts"


async def test_load_samples_arrive_the_newest_last() -> None:
    mirror = CacheMirror(epoch=1)
    items = mirror.subscribe(1).items()
    await next_item(items, "load")
    for n in range(10):
        mirror.set_load(LoadSample(running=n))
    assert (await next_item(items, "load")).load.running == 9


async def test_a_snapshot_is_of_one_moment_however_slowly_its_parts_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_mirror, "SNAPSHOT_CHUNK_BLOCKS", 2)
    mirror = CacheMirror(epoch=1)
    mirror.apply([stored(0, 5)])
    items = mirror.subscribe(1).items()
    told = [await next_item(items, "snapshot")]
    for n in range(3):
        mirror.apply([removed(n), stored(10 + n, 1)])
        if n < 2:
            told.append(await next_item(items, "snapshot"))
    assert [n for item in told for n in numbers(item.snapshot.block_hashes)] == [0, 1, 2, 3, 4]
    assert [item.sequence for item in told] == [1, 1, 1]
    assert [(await next_item(items, "events")).sequence for _ in range(3)] == [2, 3, 4]


async def test_watchers_of_one_stride_share_what_they_are_told_and_strides_are_bounded() -> None:
    mirror = CacheMirror(epoch=1)
    watches = [mirror.subscribe(stride).items() for stride in (1, 1, *range(2, cache_mirror.MAX_STRIDES + 1))]
    for items in watches:
        await next_item(items, "snapshot")
    mirror.apply([stored(0, 5)])
    first, second = [await next_item(items, "events") for items in watches[:2]]
    assert first is second
    with pytest.raises(RequestRefused, match="8 other strides are watched already: 1, 2, 3") as caught:
        mirror.subscribe(99)
    assert caught.value.reason == OVERLOADED
    mirror.subscribe(3)
