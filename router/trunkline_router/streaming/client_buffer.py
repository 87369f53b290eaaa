"""What one request's workers have said and its client has not taken yet: it merges, and what merges is bounded."""

import mmap
from collections.abc import Callable, Collection

from trunkline.v1.generation_pb2 import OutputChunk
from trunkline_router.streaming.backlog import Backlog

MAX_WAITING_BYTES = 8 << 20  # of one request, as they travel: hours of text, or minutes of it with 20 logprobs each
# Of one response, as it travels, but for the last chunk that joined it. Until a response has left, it takes
# RESPONSE_COST times as much at most: as a message, serialized, and in the transport.
MAX_RESPONSE_BYTES = 64 << 10
RESPONSE_COST = 7


class _Unsent:
    """What one choice has produced since the client last took something.

    The first chunk is passed on as it came. Once a second one joins it, they are kept as they travel: serialized chunks
    one after the other are one chunk, but for its text and where it starts. By then the client is slow, and the step's
    whole message, of which a chunk is a part, should not be kept in memory for it.
    """

    __slots__ = ("_first", "_first_token_index", "_text", "_text_offset", "_wire")

    def __init__(self, chunk: OutputChunk) -> None:
        self._first: OutputChunk | None = chunk
        self._first_token_index = self._text_offset = 0
        self._wire: bytearray | memoryview[int] = bytearray()
        self._text: bytearray | memoryview[int] = self._wire

    def extend(self, chunk: OutputChunk) -> int:
        """The choice's next chunk, contiguous with what is there. Returns by how many bytes more is waiting now."""
        more_bytes = self.keep_as_it_travels()
        wire, text = chunk.SerializeToString(), chunk.text.encode()
        assert isinstance(self._wire, bytearray)
        assert isinstance(self._text, bytearray)
        self._wire += wire
        self._text += text
        return more_bytes + len(wire) + len(text)

    def keep_as_it_travels(self) -> int:
        """Serializes the first chunk, where it is still a part of its step's message. Returns its bytes. They were not
        counted before: most chunks leave before another one comes."""
        first = self._first
        if first is None:
            return 0
        self._first = None
        self._first_token_index, self._text_offset = first.first_token_index, first.text_offset
        self._wire, self._text = bytearray(first.SerializeToString()), bytearray(first.text.encode())
        return len(self._wire) + len(self._text)

    def move(self, room: memoryview) -> memoryview:
        """Keeps the chunk at the beginning of `room`, and returns the rest of it. Nothing may join it any more."""
        end = len(self._wire) + len(self._text)
        wire, text = room[: len(self._wire)], room[len(self._wire) : end]
        wire[:], text[:] = self._wire, self._text
        self._wire, self._text = wire, text
        return room[end:]

    def merged(self) -> OutputChunk:
        """All of it as one chunk."""
        if self._first is not None:
            return self._first
        chunk = OutputChunk.FromString(bytes(self._wire))
        chunk.first_token_index, chunk.text_offset = self._first_token_index, self._text_offset
        chunk.text = str(self._text, "utf-8")
        return chunk


def _move_off_the_heap(chunks: Collection[_Unsent], num_bytes: int) -> None:
    """Keeps the chunks of a full response, `num_bytes` in all, in a mapping of its own, which goes back to the system
    with its last chunk.

    On the heap these bytes would lie between those that others need, for as long as a client is slow. Once they are
    free, protobuf returns all of them to the system in one call: it trims the heap whenever it has freed 10,000 blocks,
    on the thread that freed the last one, which is the event loop's. With 500 MiB this takes 0.2 s.
    https://github.com/protocolbuffers/protobuf/blob/main/python/protobuf.c
    """
    room = memoryview(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    for chunk in chunks:
        room = chunk.move(room)


class ClientBuffer:
    """`fall_behind` is called with the reason where the client has let too much wait, here or beside all others."""

    __slots__ = ("_backlog", "_chunks", "_chunks_bytes", "_full", "_leaving_bytes", "_waiting_bytes", "fall_behind",
                 "holds_any")  # fmt: skip

    def __init__(self, backlog: Backlog, fall_behind: Callable[[str], None]) -> None:
        self._backlog = backlog
        self.fall_behind = fall_behind
        self._chunks: dict[int, _Unsent] = {}  # by choice
        self._chunks_bytes = 0
        self._full: list[tuple[dict[int, _Unsent], int]] = []  # what comes before them, by response; with its bytes
        self._waiting_bytes = 0  # of all that has merged
        self._leaving_bytes = 0  # that the response takes which was taken last
        self.holds_any = False  # anything at all

    def add(self, index: int, chunk: OutputChunk) -> None:
        """A choice's next chunk."""
        waiting = self._chunks.get(index)
        if waiting is None:
            self._chunks[index] = waiting = _Unsent(chunk)
            self.holds_any = True
            if self._full:  # the client is slow
                self._count(waiting.keep_as_it_travels())
            return
        self._count(waiting.extend(chunk))
        if self._chunks_bytes > MAX_RESPONSE_BYTES and self._chunks:
            self._close_response()

    def _count(self, more_bytes: int) -> None:
        self._chunks_bytes += more_bytes
        self._waiting_bytes += more_bytes
        if self._waiting_bytes > MAX_WAITING_BYTES:
            self.fall_behind(f"more than {MAX_WAITING_BYTES} bytes of output waited for it")
        else:
            self._backlog.grow(self, more_bytes)

    def _close_response(self) -> None:
        """Nothing joins the chunks any more that are there."""
        self._count(sum(chunk.keep_as_it_travels() for chunk in self._chunks.values()))
        if self._chunks:  # its client has not fallen behind with that
            _move_off_the_heap(self._chunks.values(), self._chunks_bytes)
            self._full.append((self._chunks, self._chunks_bytes))
            self._chunks, self._chunks_bytes = {}, 0

    def take(self) -> list[OutputChunk]:
        """Takes out what goes into the next response. It counts until it has left()."""
        if self._full:
            chunks, num_bytes = self._full.pop(0)
        else:
            chunks, num_bytes = self._chunks, self._chunks_bytes
            self._chunks, self._chunks_bytes = {}, 0
        self.holds_any = bool(self._chunks or self._full)
        if num_bytes:
            self._waiting_bytes -= num_bytes
            self._leaving_bytes = RESPONSE_COST * num_bytes
            self._backlog.grow(self, self._leaving_bytes - num_bytes)
        return [unsent.merged() for unsent in chunks.values()]

    def left(self) -> None:
        """What was taken is on its way to the client."""
        if self._leaving_bytes:
            leaving_bytes, self._leaving_bytes = self._leaving_bytes, 0
            self._backlog.shrink(self, leaving_bytes)

    def clear(self) -> None:
        """The client reads no more: what is kept for it is dropped."""
        self._chunks = {}
        self._backlog.remains.drop(self._full)
        self._full = []
        self.holds_any = False
        self._chunks_bytes = self._waiting_bytes = self._leaving_bytes = 0
        self._backlog.clear(self)
        self.fall_behind = _ignore  # keeps no reference to the callback's owner, which refers to this


def _ignore(reason: str) -> None:
    """The callback of a stream that is over."""
