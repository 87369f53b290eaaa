"""What a worker's WatchCache stream says, applied to the index. Pure."""

from trunkline.v1.worker_pb2 import WatchCacheResponse
from trunkline_router.prefix_index import keys_of
from trunkline_router.worker_blocks import WorkerBlocks


class WatchBroken(Exception):
    """The event log has a gap, or belongs to another life of the worker: start again from a snapshot."""


class CacheFollower:
    """Applies a WatchCache stream to what is known of a worker. Pure."""

    def __init__(self, blocks: WorkerBlocks, epoch: int) -> None:
        self._blocks = blocks
        self._epoch = epoch
        self._sequence: int | None = None  # of the last item; None before a snapshot is complete

    @property
    def synced(self) -> bool:
        return self._sequence is not None

    def take(self, item: WatchCacheResponse) -> bool:
        """Takes a snapshot part or events in; False where something is missing. Raises WatchBroken on a new epoch."""
        if item.epoch != self._epoch:
            raise WatchBroken("the worker was restarted")
        if item.WhichOneof("item") == "snapshot":
            if item.snapshot.first:
                self._blocks.clear()
            self._blocks.store(keys_of(item.snapshot.block_hashes))
            self._sequence = item.sequence if item.snapshot.last else None
            return True
        if self._sequence is None or item.sequence != self._sequence + 1:
            return False
        self._sequence = item.sequence
        for event in item.events.events:
            kind = event.WhichOneof("kind")
            if kind == "stored":
                self._blocks.store(keys_of(event.stored.block_hashes))
            elif kind == "removed":
                self._blocks.remove(keys_of(event.removed.block_hashes))
            elif kind == "cleared":
                self._blocks.clear()
        return True
