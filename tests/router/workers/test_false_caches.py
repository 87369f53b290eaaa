"""Whatever a worker says of its cache, the event loop is never held up by it, and the index stays bounded."""

import asyncio
import gc
import time
from random import Random
from typing import Any

import pytest

from tests.parameters import one_in
from tests.router.cluster import cluster, until
from tests.router.fake_worker import FakeWorker
from tests.router.integrity import check_index
from tests.router.liar import Liar, innocents
from trunkline.v1.worker_pb2 import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    CacheEvent,
    CacheEvents,
    CacheSnapshot,
    LoadSample,
    WatchCacheResponse,
)
from trunkline_router.routing.prefix_index import PrefixIndex, WorkerBlocks
from trunkline_router.workers.cache_follower import STEP_BLOCKS, CacheFollower
from trunkline_router.workers.cache_watch import _EVENTS, MOST_EVENTS, UNSEEN_BYTES, parsed
from trunkline_router.workers.claims import FalseClaim

MOST_STALL_S = 0.010  # 2 to 4 ms with the fake worker's own work, 8 beside a busy core; all in one turn takes 10 to 50
TRIES = 4  # a stall that the messages cause is there each time; one of a shared core is not
SET_ASIDE = {
    "more blocks than its pool has": "caches more than 100000 blocks",
    "half a hash": "not a multiple of 16",
    "empty events": f"more than {MOST_EVENTS} cache events",
    "stored and cleared on and on": "emptied its cache",
    "a few at a time": "emptied its cache",
    "more than a message may have": "more about its cache in one message",
}


class Stall:
    """The longest time for which the event loop did nothing else, seen by a task that always wants its turn."""

    def __init__(self) -> None:
        self.turns_s: list[float] = []

    async def __aenter__(self) -> "Stall":
        gc.collect()
        gc.disable()  # what it looks through is what the test session has made
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        gc.enable()
        self._task.cancel()

    async def _watch(self) -> None:
        last_s = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now_s = time.thread_time()  # of this thread alone: a busy machine makes it no longer
            self.turns_s.append(now_s - last_s)
            last_s = now_s

    @property
    def longest_s(self) -> float:
        return max(self.turns_s, default=0.0)


def stored(count: int, seed: int) -> CacheEvent:
    return CacheEvent(stored=BlocksStored(block_hashes=Random(seed).randbytes(16 * count)))


def cache_lies() -> dict[str, list[WatchCacheResponse]]:
    """Streams after an honest snapshot, by name."""
    cleared = CacheEvent(cleared=CacheCleared())

    def item(sequence: int, *events: CacheEvent) -> WatchCacheResponse:
        return WatchCacheResponse(epoch=1, sequence=sequence, events=CacheEvents(events=events))

    def snapshot(hashes: bytes) -> WatchCacheResponse:
        return WatchCacheResponse(epoch=1, snapshot=CacheSnapshot(block_hashes=hashes, first=True, last=True))

    large = Random(0).randbytes(16 * 120_000)
    return {
        "more blocks than its pool has": [snapshot(large)],
        "half a hash": [snapshot(b"x" * 15)],
        "stored and cleared on and on": [item(1, *[stored(2, 1), cleared] * 2000)],
        "a few at a time": [item(n + 1, stored(2, n), cleared) for n in range(100)],
        "a gap each time": [item(5, stored(2, 1))],
        "an epoch of its own": [WatchCacheResponse(epoch=77, load=LoadSample(running=1))] * 3,
        "removed what it never had": [item(1, CacheEvent(removed=BlocksRemoved(block_hashes=large)))],
        "empty events": [item(1, *[CacheEvent()] * 20_000)],
        "more than a message may have": [snapshot(large + large)],
        "an item that is none": [WatchCacheResponse(epoch=1, sequence=(1 << 64) - 1)],
    }


@pytest.mark.parametrize("name", one_in(3, cache_lies()))
async def test_no_news_of_a_cache_hold_up_the_loop_or_an_innocent(name: str) -> None:
    stalls_s: list[float] = []
    while len(stalls_s) < TRIES and (not stalls_s or stalls_s[-1] >= MOST_STALL_S):
        good, liar = FakeWorker("good"), Liar("liar", kv_blocks=50_000)
        async with cluster(good, liar, expected=(True, False)) as router:
            liar.said = cache_lies()[name]
            async with Stall() as stall:
                liar.may_speak.set()
                await until(lambda told=liar: told.told)  # type: ignore[misc]
                await innocents(router, "tiny", 8)
                for _ in range(200):
                    await asyncio.sleep(0)
            stalls_s.append(stall.longest_s)
            link = router.links[1]
            if name in SET_ASIDE:
                await until(lambda link=link: SET_ASIDE[name] in link.problem)  # type: ignore[misc]
            else:
                assert "unexpected" not in link.problem
            check_index(router.inference.pools.index)
    assert min(stalls_s) < MOST_STALL_S


def test_a_follower_works_in_small_steps_however_much_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    store = WorkerBlocks.store

    def counted(self: WorkerBlocks, keys: Any) -> Any:
        sizes.append(len(keys))
        return store(self, keys)

    monkeypatch.setattr(WorkerBlocks, "store", counted)
    index = PrefixIndex()
    follower = CacheFollower(WorkerBlocks(index), 1)
    hashes = Random(0).randbytes(16 * 50_000)
    snapshot = CacheSnapshot(block_hashes=hashes, first=True, last=True)
    steps = list(follower.work(WatchCacheResponse(epoch=1, snapshot=snapshot)))
    assert max(sizes) <= STEP_BLOCKS
    assert len(steps) >= 50_000 // STEP_BLOCKS
    again = list(follower.work(WatchCacheResponse(epoch=1, snapshot=snapshot)))
    assert len(again) >= 1000, "the old snapshot is swept out in steps too"
    assert not index._retired


@pytest.mark.parametrize("entry", [b"", b"\x0a\x00", b"\xfa\x7f\x00"], ids=["empty", "stored", "unknown"])
@pytest.mark.parametrize("count", [MOST_EVENTS, MOST_EVENTS + 1, 200_000])
def test_a_cache_message_of_more_events_than_a_step_has_is_not_parsed(entry: bytes, count: int) -> None:
    events = (b"\x0a" + bytes([len(entry)]) + entry) * count
    raw = WatchCacheResponse(epoch=1, sequence=2).SerializeToString() + nested(_EVENTS, events)
    if count > MOST_EVENTS:
        begun_s = time.thread_time()
        with pytest.raises(FalseClaim, match=f"more than {MOST_EVENTS} cache events"):
            parsed(raw + b" " * UNSEEN_BYTES)
        assert time.thread_time() - begun_s < 0.05
    else:
        assert len(parsed(raw).events.events) == count


@pytest.mark.parametrize(
    "raw", [b"\x17" * 10, b"\x17" * UNSEEN_BYTES * 2, b"\x22\xff\xff\xff\x7f" + bytes(UNSEEN_BYTES)]
)
def test_what_is_no_cache_message_is_a_false_claim(raw: bytes) -> None:
    with pytest.raises(FalseClaim, match="not a message"):
        parsed(raw)


def nested(number: int, value: bytes) -> bytes:
    size, length = len(value), b""
    while size > 127:
        length, size = length + bytes([size & 127 | 128]), size >> 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + value
