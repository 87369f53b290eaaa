"""The front's copy of the prefix cache's contents, and the subscribers that follow it.

The engine never waits for a subscriber and never answers one. Its events pass through here, and a subscriber that is
new or falls behind gets a snapshot of this copy.
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

MAX_PENDING_ITEMS = 1024  # a subscriber further behind gets a snapshot instead
SNAPSHOT_CHUNK_BLOCKS = 16_384  # 256 KiB of hashes: short enough that subscribers can serve other workers in between
MAX_STRIDES = 8  # different strides at once: each step's events are thinned once per stride
RETRY_MS = 1000
LOAD_INTERVAL_S = 0.05  # shortest interval between load samples


class Subscription:
    """The items that one WatchCache call still has to send."""

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
        """Whether to call offer(). False while a snapshot is due, which will contain the events."""
        return not self._needs_snapshot

    def offer(self, item: WatchCacheResponse) -> None:
        """Queues the events of one step. If too many items are queued, drops all and schedules a snapshot."""
        if len(self._pending) >= MAX_PENDING_ITEMS:
            self._pending.clear()
            self._needs_snapshot = True
        else:
            self._pending.append(item)
        self._wake.set()

    def offer_load(self, load: LoadSample) -> None:
        """Queues a load sample, which replaces one that was not sent yet."""
        self._load = load
        self._wake.set()

    async def items(self) -> AsyncIterator[WatchCacheResponse]:
        """Yields a snapshot, then events and load samples; another snapshot after falling behind."""
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
    """A copy of the engine's prefix cache (digest → depth of each block), kept current for subscribers."""

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
        """Returns a new subscription. Raises RequestRefused (OVERLOADED) if MAX_STRIDES other strides are watched."""
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
        """Applies the events of one step, and passes them on to the subscribers."""
        if not events:
            return
        self.sequence += 1
        items: dict[int, WatchCacheResponse] = {}  # by stride, shared by its subscribers
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
        """Stores a load sample, and sends it to subscribers within LOAD_INTERVAL_S."""
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
        """Yields the contents as of the first part, in parts. Later changes are not included. Each part is built when
        it is taken."""
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
        """Returns the events reduced to every stride-th block of a chain, without those that become empty."""
        kept: list[CacheEvent] = []
        stored_now: dict[bytes, int] = {}  # depths that are not in self._depth yet
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
