"""What front and engine share: a local socket, and a record in memory that outlives the engine.

A message on the socket is its length in 4 little-endian bytes, then protobuf. The record holds the sequences of the
steps in flight. The engine writes it before each launch, and the front reads it after the engine has died: messages
would add to the cost of a step, and the last one might never be sent.
"""

import mmap
import os
import struct
import tempfile
from collections.abc import Sequence
from typing import BinaryIO, cast

from google.protobuf.message import Message

LENGTH_BYTES = 4
STEPS_UNDER_WAY = 2  # at most: settings.run_ahead is 1 or 0
MAX_SEQUENCES = 1 << 16  # in one step; further ones are not recorded
COUNT = struct.Struct("<Q")


def frame(message: Message) -> bytes:
    """The bytes of one message on the socket."""
    payload = message.SerializeToString()
    return len(payload).to_bytes(LENGTH_BYTES, "little") + payload


class FrameReader:
    """Assembles messages from the pieces that a socket returns."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Adds received bytes, and returns the payloads that are complete now."""
        buffer = self._buffer
        buffer += data
        payloads: list[bytes] = []
        start = 0
        while len(buffer) - start >= LENGTH_BYTES:
            end = start + LENGTH_BYTES + int.from_bytes(buffer[start : start + LENGTH_BYTES], "little")
            if len(buffer) < end:
                break
            payloads.append(bytes(buffer[start + LENGTH_BYTES : end]))
            start = end
        del buffer[:start]
        return payloads


class FlightRecorder:
    """Records sequences by the front's handles."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._next = 0
        self.steps = STEPS_UNDER_WAY  # that may be in flight at once

    @classmethod
    def create(cls) -> tuple["FlightRecorder", BinaryIO]:
        """A new recorder, and the unnamed file whose descriptor another process passes to open()."""
        file = shared_file("flight-recorder", STEPS_UNDER_WAY * _slot_bytes())
        return cls.open(file.fileno()), file

    @classmethod
    def open(cls, descriptor: int) -> "FlightRecorder":
        """The recorder that another process has created."""
        return cls(mmap.mmap(descriptor, STEPS_UNDER_WAY * _slot_bytes()))

    def launch(self, handles: Sequence[int]) -> None:
        """Records a step with these sequences, which is about to begin, in place of the oldest one."""
        start = self._next * _slot_bytes()
        self._next = (self._next + 1) % self.steps
        handles = handles[:MAX_SEQUENCES]
        # The count is written last: an engine that dies in between leaves the slot empty, not half old and half new.
        COUNT.pack_into(self._memory, start, 0)
        struct.pack_into(f"<{len(handles)}Q", self._memory, start + COUNT.size, *handles)
        COUNT.pack_into(self._memory, start, len(handles))

    def in_flight(self) -> set[int]:
        """Sequences of the steps in flight, or of the last steps if none was in flight."""
        found: set[int] = set()
        for start in range(0, STEPS_UNDER_WAY * _slot_bytes(), _slot_bytes()):
            (count,) = COUNT.unpack_from(self._memory, start)
            found.update(struct.unpack_from(f"<{count}Q", self._memory, start + COUNT.size))
        return found


def shared_file(name: str, num_bytes: int) -> BinaryIO:
    """A new unnamed file, all zeros, for memory that processes share.  name: for the operator"""
    # Without memfd_create the file is on a disk, and a full disk would harm the processes.
    has_memfd = hasattr(os, "memfd_create")
    file: BinaryIO
    file = os.fdopen(os.memfd_create(name), "w+b") if has_memfd else _temporary_file()
    file.truncate(num_bytes)
    return file


def _temporary_file() -> BinaryIO:
    return cast("BinaryIO", tempfile.TemporaryFile())  # the caller closes it


def _slot_bytes() -> int:
    return COUNT.size * (1 + MAX_SEQUENCES)
