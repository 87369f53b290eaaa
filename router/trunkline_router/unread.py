"""What one request's workers have said and its client has not taken yet: it merges, and what merges is bounded."""

from collections.abc import Callable

from trunkline.v1.generation_pb2 import OutputChunk
from trunkline_router.backlog import Backlog

MAX_WAITING_BYTES = 8 << 20  # of one request, as they travel: hours of text, or minutes of it with 20 logprobs each
# Of one response, as it travels, but for the last chunk that joined it. Until a response has left, it takes
# RESPONSE_COST times as much at most: as a message, serialized, and in the transport.
MAX_RESPONSE_BYTES = 256 << 10
RESPONSE_COST = 7


class _Unsent:
    """What one choice has produced since the client last took something.

    The first chunk is passed on as it came. Once a second one joins it, they are kept as they travel: serialized chunks
    one after the other are one chunk, but for its text and where it starts. By then the client is slow, and the step's
    whole message, of which a chunk is a part, should not be kept in memory for it.
    """

    __slots__ = ("_first", "_text", "_wire")

    def __init__(self, chunk: OutputChunk) -> None:
        self._first = chunk
        self._wire: bytearray | None = None
        self._text = bytearray()

    def extend(self, chunk: OutputChunk) -> int:
        """The choice's next chunk, contiguous with what is there. Returns by how many bytes more is waiting now."""
        wire = chunk.SerializeToString()
        more_bytes = len(wire)
        if self._wire is None:
            first = self._first
            self._first = OutputChunk(first_token_index=first.first_token_index, text_offset=first.text_offset)
            self._wire = bytearray(first.SerializeToString())
            self._text += first.text.encode()
            more_bytes += len(self._wire)  # not counted before: most chunks leave before another one comes
        self._wire += wire
        self._text += chunk.text.encode()
        return more_bytes

    def merged(self) -> OutputChunk:
        if self._wire is None:
            return self._first
        chunk = OutputChunk.FromString(bytes(self._wire))
        chunk.first_token_index = self._first.first_token_index
        chunk.text_offset = self._first.text_offset
        chunk.text = self._text.decode()
        return chunk


class Unread:
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
            self._chunks[index] = _Unsent(chunk)
            self.holds_any = True
            return
        more_bytes = waiting.extend(chunk)
        self._chunks_bytes += more_bytes
        self._waiting_bytes += more_bytes
        if self._waiting_bytes > MAX_WAITING_BYTES:
            self.fall_behind(f"more than {MAX_WAITING_BYTES} bytes of output waited for it")
            return
        self._backlog.grow(self, more_bytes)
        if self._chunks_bytes > MAX_RESPONSE_BYTES:
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
        self._full.clear()
        self.holds_any = False
        self._chunks_bytes = self._waiting_bytes = self._leaving_bytes = 0
        self._backlog.clear(self)
        self.fall_behind = _is_over  # a cycle with whoever was to be told would stay until the collector comes by


def _is_over(reason: str) -> None:
    """Nobody is told of a client that reads no more."""
