"""The index of one worker and the cache follower: pure, so tested without a worker."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trunkline.v1.worker_pb2 import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    CacheEvent,
    CacheEvents,
    CacheSnapshot,
    SessionRequest,
    Submit,
    WatchCacheResponse,
)
from trunkline_bench.simulation.fleet.router import Follower
from trunkline_router.routing.prefix_index import SHIFT, PrefixIndex, WorkerBlocks
from trunkline_router.workers import session
from trunkline_router.workers.cache_follower import WatchBroken
from trunkline_router.workers.session import split_request


def digest(n: int) -> bytes:
    return (n << 64 + SHIFT).to_bytes(16, "big")


def digests(n: int, start: int = 0) -> list[bytes]:
    return [digest(start + i) for i in range(n)]


def chain(n: int, start: int = 0) -> list[int]:
    """The keys of digests(n, start)."""
    return list(range(start, start + n))


def blocks_of() -> WorkerBlocks:
    index = PrefixIndex()
    index.attach()  # another worker
    return WorkerBlocks(index)


def prefix(blocks: WorkerBlocks, keys: list[int]) -> int:
    """How many leading blocks of a chain a worker holds."""
    ((count, bit),) = blocks._index.match(keys, blocks.bit)
    assert bit == blocks.bit
    return count


def test_the_longest_held_prefix_is_found() -> None:
    blocks = blocks_of()
    blocks.store(chain(7))
    assert [prefix(blocks, chain(n)) for n in (0, 1, 6, 7, 8, 100)] == [0, 1, 6, 7, 7, 7]
    assert prefix(blocks, chain(5, start=50)) == 0


def test_expected_blocks_count_while_their_request_runs() -> None:
    blocks = blocks_of()
    blocks.expect(chain(4))
    blocks.expect(chain(4))
    blocks.stop_expecting(chain(4))
    assert prefix(blocks, chain(6)) == 4
    blocks.stop_expecting(chain(4))
    assert prefix(blocks, chain(6)) == 0


def stored(digests: list[bytes]) -> CacheEvent:
    return CacheEvent(stored=BlocksStored(block_hashes=b"".join(digests)))


def removed(digests: list[bytes]) -> CacheEvent:
    return CacheEvent(removed=BlocksRemoved(block_hashes=b"".join(digests)))


def events(sequence: int, *items: CacheEvent, epoch: int = 1) -> WatchCacheResponse:
    return WatchCacheResponse(epoch=epoch, sequence=sequence, events=CacheEvents(events=items))


def snapshot(sequence: int, digests: list[bytes], *, first: bool = True, last: bool = True) -> WatchCacheResponse:
    part = CacheSnapshot(block_hashes=b"".join(digests), first=first, last=last)
    return WatchCacheResponse(epoch=1, sequence=sequence, snapshot=part)


def test_a_follower_applies_a_snapshot_in_parts_then_events() -> None:
    blocks = blocks_of()
    follower = Follower(blocks, epoch=1)
    assert follower.take(snapshot(5, digests(3), last=False))
    assert not follower.synced
    assert follower.take(snapshot(5, digests(3, start=3), first=False))
    assert follower.synced
    assert follower.take(events(6, removed(digests(2, start=4)), stored(digests(1, start=9))))
    assert len(blocks) == 5
    assert follower.take(events(7, CacheEvent(cleared=CacheCleared())))
    assert len(blocks) == 0


def test_a_gap_and_a_new_epoch_are_noticed() -> None:
    follower = Follower(blocks_of(), epoch=1)
    assert not follower.take(events(1)), "events before a snapshot"
    assert follower.take(snapshot(5, []))
    assert not follower.take(events(7))
    with pytest.raises(WatchBroken):
        Follower(blocks_of(), epoch=1).take(events(1, epoch=2))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=80), st.integers(0, 40))
def test_the_index_equals_a_brute_force_model(changes: list[tuple[bool, int]], length: int) -> None:
    """Prefixes are stored whole and removed from their ends, as caches do; a snapshot may come at any time."""
    blocks, truth = blocks_of(), set[bytes]()
    follower = Follower(blocks, epoch=1)
    follower.take(snapshot(0, []))
    for sequence, (grows, n) in enumerate(changes, start=1):
        if grows:
            follower.take(events(sequence, stored(digests(n))))
            truth |= set(digests(n))
        elif n == 30:
            follower.take(snapshot(sequence, sorted(truth)))
        else:
            gone = [d for d in digests(60) if int.from_bytes(d[:8], "big") >> SHIFT >= n]
            follower.take(events(sequence, removed(gone)))
            truth -= set(gone)
    expected = next((i for i, d in enumerate(digests(length)) if d not in truth), length)
    assert prefix(blocks, chain(length)) == expected


def test_a_burst_of_long_prompts_leaves_in_messages_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MAX_SUBMITS_BYTES", 1000)
    submits = [Submit(handle=n, prompt_token_ids=[1000] * 150) for n in range(1, 8)]
    submits.append(Submit(handle=8, prompt_token_ids=[1000] * 5000))  # too large by itself: goes alone
    parts = list(split_request(SessionRequest(submits=submits, abort_handles=[99])))
    assert [submit.handle for part in parts for submit in part.submits] == list(range(1, 9))
    assert [list(part.abort_handles) for part in parts] == [*[[]] * (len(parts) - 1), [99]], (
        "no abort overtakes a submit"
    )
    assert all(part.ByteSize() < 1100 for part in parts[:-1])
    assert len(parts) < 8
    assert list(split_request(SessionRequest())) == []
