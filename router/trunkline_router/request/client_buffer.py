"""Buffers the output of each request until its client reads it. Output that waits is merged and bounded."""

import asyncio
import mmap
from collections import deque
from collections.abc import Callable, Collection, Iterable

from trunkline.v1.generation_pb2 import OutputChunk

MAX_ALL_WAITING_BYTES = 512 << 20  # default
TURN_BYTES = 2 << 20  # memory freed in one turn of the event loop: about half a millisecond


class DeferredFrees:
    """Frees the output that was kept for clients which have left, one part per turn of the event loop. Hundreds of slow
    clients may leave at the same time, and freeing 500 MiB takes 0.1 s."""

    def __init__(self) -> None:
        self._parts: deque[tuple[object, int]] = deque()
        self.freed_bytes = 0  # so far

    def drop(self, parts: Iterable[tuple[object, int]]) -> None:
        """Frees the parts, given with their sizes in bytes, over time. There must be no other reference to them."""
        is_due = not self._parts
        self._parts.extend(parts)
        if is_due and self._parts:
            self._free_soon()

    def _free_soon(self) -> None:
        asyncio.get_running_loop().call_soon(self._free)

    def _free(self) -> None:
        freed_bytes = 0
        while self._parts and freed_bytes < TURN_BYTES:
            freed_bytes += self._parts.popleft()[1]
        self.freed_bytes += freed_bytes
        if self._parts:
            self._free_soon()


class Backlog:
    """Bounds the waiting output of all requests of a process. Beyond the bound, the request with the most waiting bytes
    ends, so that many slow clients together cannot exhaust the memory. Output that has not merged is not counted."""

    def __init__(self, max_bytes: int = MAX_ALL_WAITING_BYTES) -> None:
        self._max_bytes = max_bytes
        self._waiting: dict[ClientBuffer, int] = {}  # waiting bytes by request
        self.waiting_bytes = 0
        self.deferred_frees = DeferredFrees()

    def grow(self, waiting: "ClientBuffer", more_bytes: int) -> None:
        """Adds to a request's waiting bytes. Ends requests if the bound is exceeded, perhaps this one."""
        self._waiting[waiting] = self._waiting.get(waiting, 0) + more_bytes
        self.waiting_bytes += more_bytes
        while self.waiting_bytes > self._max_bytes:
            furthest_behind = max(self._waiting, key=self._waiting.__getitem__)
            furthest_behind.fall_behind(f"more than {self._max_bytes} bytes of output were waiting for all clients")

    def shrink(self, waiting: "ClientBuffer", less_bytes: int) -> None:
        """Subtracts from a request's waiting bytes."""
        self.waiting_bytes -= less_bytes
        self._waiting[waiting] -= less_bytes
        if not self._waiting[waiting]:
            del self._waiting[waiting]

    def clear(self, waiting: "ClientBuffer") -> None:
        """Removes a request from the count."""
        self.waiting_bytes -= self._waiting.pop(waiting, 0)


MAX_WAITING_BYTES = 8 << 20  # serialized, of one request: hours of text, or minutes with 20 logprobs per token
# Serialized size of one response without its last chunk. Until a response is sent, it takes at most RESPONSE_COST times
# as much: as a message, serialized, and in the transport.
MAX_RESPONSE_BYTES = 64 << 10
RESPONSE_COST = 7


class _Unsent:
    """The output of one choice since the client's last response.

    A single chunk is passed on as it arrived. Once a second one is added, chunks are kept serialized: concatenated,
    they parse as one chunk, except for its text and its start. By then the client is slow, and a chunk would otherwise
    keep the whole message of its step in memory.
    """

    __slots__ = ("_first", "_first_token_index", "_text", "_text_offset", "_wire")

    def __init__(self, chunk: OutputChunk) -> None:
        self._first: OutputChunk | None = chunk
        self._first_token_index = self._text_offset = 0
        self._wire: bytearray | memoryview[int] = bytearray()
        self._text: bytearray | memoryview[int] = self._wire

    def extend(self, chunk: OutputChunk) -> int:
        """Adds the choice's next chunk, which must be contiguous. Returns the increase in waiting bytes."""
        more_bytes = self.serialize()
        wire, text = chunk.SerializeToString(), chunk.text.encode()
        assert isinstance(self._wire, bytearray)
        assert isinstance(self._text, bytearray)
        self._wire += wire
        self._text += text
        return more_bytes + len(wire) + len(text)

    def serialize(self) -> int:
        """Serializes the first chunk unless that is done. Returns the increase in waiting bytes: a single chunk is not
        counted, because most chunks are sent before the next one arrives."""
        first = self._first
        if first is None:
            return 0
        self._first = None
        self._first_token_index, self._text_offset = first.first_token_index, first.text_offset
        self._wire, self._text = bytearray(first.SerializeToString()), bytearray(first.text.encode())
        return len(self._wire) + len(self._text)

    def move(self, room: memoryview) -> memoryview:
        """Moves the chunk to the beginning of `room` and returns the rest of it. No chunk may be added after that."""
        end = len(self._wire) + len(self._text)
        wire, text = room[: len(self._wire)], room[len(self._wire) : end]
        wire[:], text[:] = self._wire, self._text
        self._wire, self._text = wire, text
        return room[end:]

    def merged(self) -> OutputChunk:
        """Returns all of the output as one chunk."""
        if self._first is not None:
            return self._first
        chunk = OutputChunk.FromString(bytes(self._wire))
        chunk.first_token_index, chunk.text_offset = self._first_token_index, self._text_offset
        chunk.text = str(self._text, "utf-8")
        return chunk


def _move_off_the_heap(chunks: Collection[_Unsent], num_bytes: int) -> None:
    """Moves the chunks of a full response, `num_bytes` in total, to their own memory mapping, which the system gets
    back with the last chunk.

    On the heap, these bytes would lie between other allocations for as long as the client is slow. Once they were free,
    protobuf would return all of them to the system in one call: it trims the heap after freeing 10,000 blocks, on the
    thread that freed the last one, which is the event loop's. With 500 MiB this takes 0.2 s.
    https://github.com/protocolbuffers/protobuf/blob/main/python/protobuf.c
    """
    room = memoryview(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    for chunk in chunks:
        room = chunk.move(room)


class ClientBuffer:
    """The output of one request that its client has not read. `fall_behind` is called with the reason if too much
    output waits, in this buffer or in all buffers together."""

    __slots__ = ("_backlog", "_chunks", "_chunks_bytes", "_full", "_sending_bytes", "_waiting_bytes", "fall_behind",
                 "holds_any")  # fmt: skip

    def __init__(self, backlog: Backlog, fall_behind: Callable[[str], None]) -> None:
        self._backlog = backlog
        self.fall_behind = fall_behind
        self._chunks: dict[int, _Unsent] = {}  # by choice
        self._chunks_bytes = 0
        self._full: list[tuple[dict[int, _Unsent], int]] = []  # earlier responses: their chunks by choice, and bytes
        self._waiting_bytes = 0  # of all serialized chunks
        self._sending_bytes = 0  # memory of the response that was taken last
        self.holds_any = False  # whether there is any output

    def add(self, index: int, chunk: OutputChunk) -> None:
        """Adds a choice's next chunk."""
        waiting = self._chunks.get(index)
        if waiting is None:
            self._chunks[index] = waiting = _Unsent(chunk)
            self.holds_any = True
            if self._full:  # the client is slow
                self._count(waiting.serialize())
            return
        self._count(waiting.extend(chunk))
        if self._chunks_bytes > MAX_RESPONSE_BYTES and self._chunks:
            self._close_response()

    def _count(self, more_bytes: int) -> None:
        self._chunks_bytes += more_bytes
        self._waiting_bytes += more_bytes
        if self._waiting_bytes > MAX_WAITING_BYTES:
            self.fall_behind(f"more than {MAX_WAITING_BYTES} bytes of output were waiting")
        else:
            self._backlog.grow(self, more_bytes)

    def _close_response(self) -> None:
        """Makes the current chunks a full response, to which no chunk is added."""
        self._count(sum(chunk.serialize() for chunk in self._chunks.values()))
        if self._chunks:  # _count() may have ended the request
            _move_off_the_heap(self._chunks.values(), self._chunks_bytes)
            self._full.append((self._chunks, self._chunks_bytes))
            self._chunks, self._chunks_bytes = {}, 0

    def take(self) -> list[OutputChunk]:
        """Removes and returns the chunks of the next response. Their bytes count until mark_sent() is called."""
        if self._full:
            chunks, num_bytes = self._full.pop(0)
        else:
            chunks, num_bytes = self._chunks, self._chunks_bytes
            self._chunks, self._chunks_bytes = {}, 0
        self.holds_any = bool(self._chunks or self._full)
        if num_bytes:
            self._waiting_bytes -= num_bytes
            self._sending_bytes = RESPONSE_COST * num_bytes
            self._backlog.grow(self, self._sending_bytes - num_bytes)
        return [unsent.merged() for unsent in chunks.values()]

    def mark_sent(self) -> None:
        """Records that the response that was taken last has been written."""
        if self._sending_bytes:
            sending_bytes, self._sending_bytes = self._sending_bytes, 0
            self._backlog.shrink(self, sending_bytes)

    def clear(self) -> None:
        """Drops all output because the client reads no more."""
        self._chunks = {}
        self._backlog.deferred_frees.drop(self._full)
        self._full = []
        self.holds_any = False
        self._chunks_bytes = self._waiting_bytes = self._sending_bytes = 0
        self._backlog.clear(self)
        self.fall_behind = _ignore  # breaks the reference cycle with the callback's owner


def _ignore(reason: str) -> None:
    """The `fall_behind` callback after clear()."""
