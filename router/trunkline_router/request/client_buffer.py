"""Buffers the output of each request until its client reads it. Output that waits is merged and bounded."""

from collections import deque
from collections.abc import Callable

from trunkline.v1.generation_pb2 import OutputChunk
from trunkline.v1.worker_pb2 import SequenceOutput

MAX_ALL_WAITING_BYTES = 512 << 20  # default, of all requests of a process
MAX_WAITING_BYTES = 8 << 20  # serialized, of one request: hours of text, or minutes with 20 logprobs per token
# Serialized size of one response without its last chunk. Until a response is sent, it takes at most RESPONSE_COST times
# as much: as a message, serialized, and in the transport.
MAX_RESPONSE_BYTES = 64 << 10
RESPONSE_COST = 7


class Backlog:
    """Bounds the waiting output of all requests of a process. Beyond the bound, the request with the most waiting bytes
    ends, so that many slow clients together cannot exhaust the memory. Tokens that have not merged are not counted."""

    def __init__(self, max_bytes: int = MAX_ALL_WAITING_BYTES) -> None:
        self._max_bytes = max_bytes
        self._waiting: dict[ClientBuffer, int] = {}  # waiting bytes by request
        self.waiting_bytes = 0

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


class MergedResponse:
    """Chunks of a response, serialized: those of one choice, concatenated, parse as one chunk, except for its text and
    its start. As messages, they would keep the whole messages of their steps in memory."""

    __slots__ = ("_choices", "num_bytes")

    def __init__(self) -> None:
        # By choice: first token index and text offset of its first chunk; all chunks and their texts.
        self._choices: dict[int, tuple[int, int, bytearray, bytearray]] = {}
        self.num_bytes = 0

    def add(self, index: int, chunk: OutputChunk) -> int:
        """Adds a choice's next chunk, which must be contiguous. Returns the bytes that it takes."""
        if index not in self._choices:
            self._choices[index] = chunk.first_token_index, chunk.text_offset, bytearray(), bytearray()
        _, _, all_wire, all_text = self._choices[index]
        wire, text = chunk.SerializeToString(), chunk.text.encode()
        all_wire += wire
        all_text += text
        self.num_bytes += len(wire) + len(text)
        return len(wire) + len(text)

    def chunks(self) -> dict[int, OutputChunk]:
        """Returns all of the output, one chunk for each choice, by choice."""
        chunks = {}
        for index, (first_token_index, text_offset, wire, text) in self._choices.items():
            chunk = OutputChunk.FromString(bytes(wire))
            chunk.first_token_index, chunk.text_offset, chunk.text = first_token_index, text_offset, text.decode()
            chunks[index] = chunk
        return chunks


class ClientBuffer:
    """The output of one request that its client has not read. `fall_behind` is called with the reason if too much
    output waits, in this buffer or in all buffers together.

    The first chunk of each choice since the last response is kept as it came, and not counted: most chunks are sent
    before the next one arrives. Once a second one comes, the client is slow, and all chunks are merged and counted.

    Vectors and scores do not merge: each is counted. InputWindow bounds how many of a request may wait.
    """

    __slots__ = (
        *("_backlog", "_chunks", "_merged", "_merged_bytes"),
        *("fall_behind", "holds_any", "sending_bytes", "wholes"),
    )

    def __init__(self, backlog: Backlog, fall_behind: Callable[[str], None]) -> None:
        self._backlog = backlog
        self.fall_behind = fall_behind
        self._chunks: dict[int, OutputChunk] = {}  # by choice; empty if anything is merged
        self._merged: deque[MergedResponse] = deque()  # the last one still grows
        self._merged_bytes = 0
        self.sending_bytes = 0  # memory of the response that was taken last
        self.wholes: deque[tuple[int, SequenceOutput, int]] = deque()  # vectors or scores, by choice, with their bytes
        self.holds_any = False  # whether there is any output

    def add(self, index: int, chunk: OutputChunk) -> None:
        """Adds a choice's next chunk."""
        self.holds_any = True
        if self._merged or index in self._chunks:
            self._merge(index, chunk)
        else:
            self._chunks[index] = chunk

    def add_whole(self, index: int, output: SequenceOutput) -> None:
        """Adds the vector or score of a choice."""
        num_bytes = output.ByteSize()
        self.wholes.append((index, output, num_bytes))
        self._backlog.grow(self, num_bytes)

    def take_whole(self) -> tuple[int, SequenceOutput]:
        """Removes the vector or score that has waited longest, and returns it with its choice."""
        index, output, num_bytes = self.wholes.popleft()
        self._backlog.shrink(self, num_bytes)
        return index, output

    def _merge(self, index: int, chunk: OutputChunk) -> None:
        if not self._merged or self._merged[-1].num_bytes > MAX_RESPONSE_BYTES:
            self._merged.append(MergedResponse())
        last, chunks, self._chunks = self._merged[-1], [*self._chunks.items(), (index, chunk)], {}
        more_bytes = sum([last.add(choice, one) for choice, one in chunks])
        self._merged_bytes += more_bytes
        if self._merged_bytes > MAX_WAITING_BYTES:
            self.fall_behind(f"more than {MAX_WAITING_BYTES} bytes of output were waiting")
        else:
            self._backlog.grow(self, more_bytes)

    def take(self) -> dict[int, OutputChunk]:
        """Removes the chunks of the next response, and returns them by choice. Their bytes count until mark_sent() is
        called."""
        if not self._merged:
            chunks, self._chunks = self._chunks, {}
            self.holds_any = False
            return chunks
        merged = self._merged.popleft()
        self.holds_any = bool(self._merged)
        self._merged_bytes -= merged.num_bytes
        self.sending_bytes = RESPONSE_COST * merged.num_bytes
        self._backlog.grow(self, self.sending_bytes - merged.num_bytes)
        return merged.chunks()

    def mark_sent(self) -> None:
        """Records that the response that was taken last has been written. Needed if `sending_bytes` is not 0."""
        if self.sending_bytes:
            sending_bytes, self.sending_bytes = self.sending_bytes, 0
            self._backlog.shrink(self, sending_bytes)

    def clear(self) -> None:
        """Drops all output because the client reads no more."""
        self._chunks, self._merged = {}, deque()
        self.wholes.clear()
        self.holds_any = False
        self._merged_bytes = self.sending_bytes = 0
        self._backlog.clear(self)
        self.fall_behind = _ignore  # breaks the reference cycle with the callback's owner


def _ignore(reason: str) -> None:
    """The `fall_behind` callback after clear()."""
