"""Applies a worker's WatchCache stream to the index. Pure."""

from collections.abc import Callable, Generator, Sequence
from math import inf

from trunkline.block_hash import HASH_BYTES
from trunkline.v1.worker_pb2 import CacheTier, WatchCacheResponse
from trunkline_router.routing.prefix_index import WorkerBlocks, keys_of
from trunkline_router.workers.claims import FalseClaim

STEP_BLOCKS = 1024  # in one step of work: at most half a millisecond
# A block takes about 100 bytes in the index. This many, of 16 tokens, are a terabyte of a small model's KV cache.
MOST_BLOCKS = 1 << 22
MOST_CLEARED, CLEARED_WITHIN_S = 16, 10.0  # a worker that clears its cache more often than this is left alone
# The tiers that the index covers: the only ones that routers ask for. A block that leaves another tier may still be on
# the device.
COVERED = (CacheTier.CACHE_TIER_UNSPECIFIED, CacheTier.CACHE_TIER_DEVICE)

Work = Generator[None, None, bool]


class WatchBroken(Exception):
    """The stream belongs to another life of the worker, which was restarted: connect again."""


class ClearsLeft:
    """How often a worker may still clear its cache: each time costs a sweep of the index."""

    def __init__(self) -> None:
        self._since_s = -inf
        self._left = MOST_CLEARED

    def renew(self, now_s: float) -> None:
        """To be called with each message."""
        if now_s - self._since_s > CLEARED_WITHIN_S:
            self._since_s, self._left = now_s, MOST_CLEARED

    def take(self) -> None:
        """Counts one. Raises FalseClaim if there are too many."""
        self._left -= 1
        if self._left < 0:
            raise FalseClaim(f"the worker emptied its cache more than {MOST_CLEARED} times in {CLEARED_WITHIN_S:g} s")


class CacheFollower:
    """Applies a WatchCache stream to the blocks of a worker, which may hold `most_blocks`, and be cleared as `clears`
    says; None: without limit."""

    def __init__(
        self, blocks: WorkerBlocks, epoch: int, clears: ClearsLeft | None = None, most_blocks: int = MOST_BLOCKS
    ) -> None:
        self._blocks = blocks
        self._clears = clears
        self._epoch = epoch
        self._most_blocks = most_blocks
        self._sequence: int | None = None  # of the last item; None before a snapshot is complete

    @property
    def synced(self) -> bool:
        return self._sequence is not None

    def work(self, item: WatchCacheResponse) -> Work:
        """Applies a part of a snapshot, or events, in small steps, between which other tasks may run. Returns False if
        an item before it is missing. Raises WatchBroken on a new epoch, and FalseClaim if the item cannot be true."""
        if item.epoch != self._epoch:
            raise WatchBroken("the worker was restarted")
        if item.WhichOneof("item") == "snapshot":
            if item.snapshot.first:
                yield from self._clear()
            if item.snapshot.tier in COVERED:
                yield from self._apply(self._store, item.snapshot.block_hashes)
            self._sequence = item.sequence if item.snapshot.last else None
            return True
        if self._sequence is None or item.sequence != self._sequence + 1:
            return False
        self._sequence = item.sequence
        for event in item.events.events:
            kind = event.WhichOneof("kind") if event.tier in COVERED else None
            if kind == "stored":
                yield from self._apply(self._store, event.stored.block_hashes)
            elif kind == "removed":
                yield from self._apply(self._blocks.remove, event.removed.block_hashes)
            elif kind == "cleared":
                yield from self._clear()
            yield
        return True

    def _apply(self, change: Callable[[Sequence[int]], None], hashes: bytes) -> Generator[None, None, None]:
        if len(hashes) % HASH_BYTES:
            raise FalseClaim(
                f"the worker's block hashes have {len(hashes)} bytes, which is not a multiple of {HASH_BYTES}"
            )
        step_bytes = STEP_BLOCKS * HASH_BYTES
        for start in range(0, len(hashes), step_bytes):
            change(keys_of(hashes[start : start + step_bytes]))
            yield

    def _store(self, keys: Sequence[int]) -> None:
        self._blocks.store(keys)
        if len(self._blocks) > self._most_blocks:
            raise FalseClaim(f"the worker says that it caches more than {self._most_blocks} blocks")

    def _clear(self) -> Generator[None, None, None]:
        """Sweeps before more is stored: so a worker that clears again and again leaves little to sweep."""
        if not len(self._blocks):
            return
        if self._clears is not None:
            self._clears.take()
        self._blocks.clear()
        while self._blocks.sweep():
            yield
