"""What an engine leaves behind when it dies: which sequences were in the steps under way.

Memory shared by the front and its engine. The engine writes before each launch, and the front reads once the engine is
gone: a message would cost a step more, and the last one might never be sent.
"""

import mmap
import os
import struct
import tempfile
from collections.abc import Sequence
from typing import BinaryIO, cast

STEPS_UNDER_WAY = 2  # at most: settings.run_ahead is 1 or 0
MAX_SEQUENCES = 1 << 16  # of one step; more than that many are not told apart
COUNT = struct.Struct("<Q")


class FlightRecorder:
    """Sequences are named by the front's handles."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._next = 0
        self.steps = STEPS_UNDER_WAY  # that may be under way at once

    @classmethod
    def create(cls) -> tuple["FlightRecorder", BinaryIO]:
        """A new one, and the file without a name by whose descriptor another process opens it."""
        # Where there is no file in memory it lies on a disk, whose being full would harm the engine.
        has_memfd = hasattr(os, "memfd_create")
        file: BinaryIO
        file = os.fdopen(os.memfd_create("flight-recorder"), "w+b") if has_memfd else _temporary_file()
        file.truncate(STEPS_UNDER_WAY * _slot_bytes())
        return cls.open(file.fileno()), file

    @classmethod
    def open(cls, descriptor: int) -> "FlightRecorder":
        """The one that another process has created."""
        return cls(mmap.mmap(descriptor, STEPS_UNDER_WAY * _slot_bytes()))

    def launch(self, handles: Sequence[int]) -> None:
        """A step with these sequences begins; the oldest one on record is over."""
        start = self._next * _slot_bytes()
        self._next = (self._next + 1) % self.steps
        handles = handles[:MAX_SEQUENCES]
        # The count last: who dies in here leaves the slot empty, not half old and half new.
        COUNT.pack_into(self._memory, start, 0)
        struct.pack_into(f"<{len(handles)}Q", self._memory, start + COUNT.size, *handles)
        COUNT.pack_into(self._memory, start, len(handles))

    def in_flight(self) -> set[int]:
        """Sequences of the last steps: those under way, or where none was, the last ones."""
        found: set[int] = set()
        for start in range(0, STEPS_UNDER_WAY * _slot_bytes(), _slot_bytes()):
            (count,) = COUNT.unpack_from(self._memory, start)
            found.update(struct.unpack_from(f"<{count}Q", self._memory, start + COUNT.size))
        return found


def _temporary_file() -> BinaryIO:
    return cast("BinaryIO", tempfile.TemporaryFile())  # the caller closes it


def _slot_bytes() -> int:
    return COUNT.size * (1 + MAX_SEQUENCES)
