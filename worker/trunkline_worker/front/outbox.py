"""Outputs that wait to be sent to one reader."""

import asyncio
from collections import deque
from collections.abc import Callable

from trunkline.channel import MAX_MESSAGE_BYTES
from trunkline.status import CODE_RESOURCE_EXHAUSTED, OVERLOADED, RequestRefused
from trunkline.v1.worker_pb2 import SequenceOutput

# A router reads at full speed and buffers for its own slow clients. One with this much waiting has stalled.
MAX_WAITING_BYTES = 4 * MAX_MESSAGE_BYTES
MAX_ALL_WAITING_BYTES = 2 * MAX_WAITING_BYTES  # of all readers: above it, the one furthest behind is given up
MAX_RESPONSE_BYTES = 256 << 10  # of outputs in one message; a single output is bounded by validation
OUTPUT_BYTES = 256  # memory of an output on top of its bytes on the wire
ROOM_BYTES = 4 << 20  # while more waits, the reader's requests are not read, so that it is sent no more refusals


class Backlog:
    """Counts the bytes that wait in all outboxes, and bounds their sum."""

    def __init__(self) -> None:
        self._waiting: dict[Outbox, int] = {}  # bytes, of non-empty outboxes
        self.all_bytes = 0  # others only read it

    def change(self, outbox: "Outbox", by_bytes: int) -> None:
        """Changes an outbox's waiting bytes. If the sum of all exceeds its bound, gives up the fullest outbox."""
        self.all_bytes += by_bytes
        waiting = self._waiting[outbox] = self._waiting.get(outbox, 0) + by_bytes
        if not waiting:
            del self._waiting[outbox]
        if self.all_bytes > MAX_ALL_WAITING_BYTES:
            max(self._waiting, key=self._waiting.__getitem__).give_up()


class Outbox:
    """Queues outputs for one reader. A step's outputs are sent in one message; while the reader is slow, outputs of
    several steps share one. Above MAX_WAITING_BYTES the reader is given up: `on_overflow` is called once, and waiting
    and later outputs are dropped.
    """

    def __init__(self, on_overflow: Callable[[], None], backlog: Backlog | None = None) -> None:
        self._on_overflow = on_overflow
        self._backlog = backlog or Backlog()
        self._waiting: deque[tuple[SequenceOutput, int]] = deque()  # with their bytes
        self._waiting_bytes = 0
        self._ended: RequestRefused | None = None
        self._wake = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()

    def put(self, output: SequenceOutput) -> None:
        if self._ended is not None:
            return
        size = output.ByteSize() + OUTPUT_BYTES
        self._waiting.append((output, size))
        self._wake.set()
        self._grow(size)
        # A single output may exceed the limit: it is bounded by validation.
        if self._waiting_bytes > MAX_WAITING_BYTES and len(self._waiting) > 1:
            self.give_up()

    def give_up(self) -> None:
        """Ends the outbox because its reader has stalled."""
        if self._ended is None:
            message = f"the output is read too slowly: {self._waiting_bytes} bytes of it waited"
            self.end(RequestRefused(CODE_RESOURCE_EXHAUSTED, OVERLOADED, message))
            self._on_overflow()

    def end(self, refused: RequestRefused) -> None:
        """Drops all outputs, waiting and later ones. take() raises `refused` from now on."""
        self._ended = refused
        self.close()

    def close(self) -> None:
        """Drops the waiting outputs."""
        self._waiting.clear()
        self._grow(-self._waiting_bytes)
        self._wake.set()

    async def room(self) -> None:
        """Waits until the reader has caught up or was given up."""
        await self._has_room.wait()

    async def take(self) -> list[SequenceOutput]:
        """Waits for outputs, and returns as many as fit into one message, at least one. Raises the RequestRefused of
        end() once it was called."""
        while not self._waiting:
            if self._ended is not None:
                raise self._ended
            self._wake.clear()
            await self._wake.wait()
        taken: list[SequenceOutput] = []
        total = 0
        while self._waiting:
            output, size = self._waiting[0]
            if taken and total + size > MAX_RESPONSE_BYTES:
                break
            self._waiting.popleft()
            total += size
            taken.append(output)
        self._grow(-total)
        return taken

    def _grow(self, by_bytes: int) -> None:
        if not by_bytes:
            return
        self._waiting_bytes += by_bytes
        if self._waiting_bytes > ROOM_BYTES:
            self._has_room.clear()
        else:
            self._has_room.set()
        self._backlog.change(self, by_bytes)
