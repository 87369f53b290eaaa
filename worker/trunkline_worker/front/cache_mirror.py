"""The front's copy of what the prefix cache holds, and the subscribers who follow it.

The engine never waits for a subscriber, nor answers one: events pass through here, and whoever comes late or falls
behind gets a snapshot of this copy.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence

from trunkline.block_hash import HASH_BYTES
from trunkline.status import CODE_RESOURCE_EXHAUSTED, OVERLOADED, RequestRefused
from trunkline.v1.worker_pb2 import (
    BlocksRemoved,
    BlocksStored,
    CacheEvent,
    CacheEvents,
    CacheSnapshot,
    LoadSample,
    WatchCacheResponse,
)

MAX_PENDING_ITEMS = 1024  # a subscriber further behind than this is given a snapshot
SNAPSHOT_CHUNK_BLOCKS = 16_384  # 256 KiB of hashes: a subscriber has others to listen to
MAX_STRIDES = 8  # different ones at once: the events of each step are thinned for each of them
RETRY_MS = 1000
LOAD_INTERVAL_S = 0.05  # load samples go out at most this often


class Subscription:
    """One WatchCache call."""

    def __init__(self, mirror: "CacheMirror", stride: int) -> None:
        self._mirror = mirror
        self._stride = max(1, stride)
        self._pending: deque[WatchCacheResponse] = deque()
        self._needs_snapshot = True
        self._load: LoadSample | None = mirror.load
        self._wake = asyncio.Event()
        self._wake.set()

    @property
    def stride(self) -> int:
        return self._stride

    @property
    def wants_events(self) -> bool:
        """Whether it is to be offered what happens; where it is not, it will have a snapshot."""
        return not self._needs_snapshot

    def offer(self, item: WatchCacheResponse) -> None:
        """Events of one step; forgotten in favour of a snapshot where too many wait already."""
        if len(self._pending) >= MAX_PENDING_ITEMS:
            self._pending.clear()
            self._needs_snapshot = True
        else:
            self._pending.append(item)
        self._wake.set()

    def offer_load(self, load: LoadSample) -> None:
        """The newest sample replaces one that was not sent yet."""
        self._load = load
        self._wake.set()

    async def items(self) -> AsyncIterator[WatchCacheResponse]:
        """A snapshot, then what happens."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._needs_snapshot:
                self._needs_snapshot = False
                for part in self._mirror.snapshot(self._stride):
                    yield part
            while self._pending:
                yield self._pending.popleft()
            if self._load is not None:
                load, self._load = self._load, None
                yield WatchCacheResponse(epoch=self._mirror.epoch, sequence=self._mirror.sequence, load=load)


class CacheMirror:
    """Digest → depth of every block that the engine holds."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.sequence = 0
        self.load = LoadSample()
        self._depth: dict[bytes, int] = {}
        self._subscriptions: set[Subscription] = set()
        self._load_timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._depth)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._depth

    def subscribe(self, stride: int) -> Subscription:
        """Raises RequestRefused (OVERLOADED) where too many different strides are asked for."""
        subscription = Subscription(self, stride)
        strides = {other.stride for other in self._subscriptions}
        if len(strides) >= MAX_STRIDES and subscription.stride not in strides:
            message = f"{MAX_STRIDES} other strides are watched already: {', '.join(map(str, sorted(strides)))}"
            raise RequestRefused(CODE_RESOURCE_EXHAUSTED, OVERLOADED, message, retry_delay_ms=RETRY_MS)
        self._subscriptions.add(subscription)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        self._subscriptions.discard(subscription)

    def apply(self, events: list[CacheEvent]) -> None:
        """Takes in what changed in one step, and passes it on."""
        if not events:
            return
        self.sequence += 1
        items: dict[int, WatchCacheResponse] = {}  # by stride: those who watch the same share one
        for subscription in self._subscriptions:
            if subscription.wants_events:
                stride = subscription.stride
                if stride not in items:
                    items[stride] = self._item(events if stride == 1 else self.thin(events, stride))
                subscription.offer(items[stride])
        for event in events:
            kind = event.WhichOneof("kind")
            if kind == "stored":
                for offset, digest in enumerate(_digests(event.stored.block_hashes)):
                    self._depth[digest] = event.stored.depth + offset
            elif kind == "removed":
                for digest in _digests(event.removed.block_hashes):
                    self._depth.pop(digest, None)
            else:
                self._depth.clear()

    def set_load(self, load: LoadSample) -> None:
        """Notes how busy the engine is; subscribers hear of it soon."""
        self.load = load
        if self._load_timer is None and self._subscriptions:
            self._load_timer = asyncio.get_running_loop().call_later(LOAD_INTERVAL_S, self._send_load)

    def _send_load(self) -> None:
        self._load_timer = None
        for subscription in self._subscriptions:
            subscription.offer_load(self.load)

    def _item(self, events: Sequence[CacheEvent]) -> WatchCacheResponse:
        return WatchCacheResponse(epoch=self.epoch, sequence=self.sequence, events=CacheEvents(events=events))

    def snapshot(self, stride: int) -> Iterator[WatchCacheResponse]:
        """The contents at the first part, whatever happens before the last one is taken; a part is made when its turn
        comes."""
        digests = [d for d, depth in self._depth.items() if depth % stride == stride - 1]
        sequence = self.sequence
        starts = range(0, max(1, len(digests)), SNAPSHOT_CHUNK_BLOCKS)
        chunk_blocks = SNAPSHOT_CHUNK_BLOCKS
        for start in starts:
            yield WatchCacheResponse(
                epoch=self.epoch,
                sequence=sequence,
                snapshot=CacheSnapshot(
                    block_hashes=b"".join(digests[start : start + chunk_blocks]),
                    first=start == 0,
                    last=start == starts[-1],
                ),
            )

    def thin(self, events: list[CacheEvent], stride: int) -> list[CacheEvent]:
        """The same events with every stride-th block of a chain only; events that are empty then stay out."""
        kept: list[CacheEvent] = []
        stored_now: dict[bytes, int] = {}  # depths that self._depth does not have yet
        for event in events:
            kind = event.WhichOneof("kind")
            if kind == "stored":
                depth, digests = event.stored.depth, _digests(event.stored.block_hashes)
                stored_now.update((d, depth + offset) for offset, d in enumerate(digests))
                chosen = [d for d in digests if stored_now[d] % stride == stride - 1]
                if chosen:
                    first = depth + (stride - 1 - depth) % stride
                    stored = BlocksStored(
                        block_hashes=b"".join(chosen), parent_hash=event.stored.parent_hash, depth=first
                    )
                    kept.append(CacheEvent(stored=stored, tier=event.tier))
            elif kind == "removed":
                depths = {d: stored_now.get(d, self._depth.get(d, 0)) for d in _digests(event.removed.block_hashes)}
                chosen = [d for d, depth in depths.items() if depth % stride == stride - 1]
                if chosen:
                    kept.append(CacheEvent(removed=BlocksRemoved(block_hashes=b"".join(chosen)), tier=event.tier))
            else:
                kept.append(event)
        return kept


def _digests(joined: bytes) -> list[bytes]:
    return [joined[start : start + HASH_BYTES] for start in range(0, len(joined), HASH_BYTES)]
