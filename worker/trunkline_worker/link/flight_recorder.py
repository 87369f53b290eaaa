"""A record of the sequences in the steps in flight, which the front can read after its engine has died.

It is memory shared by the front and its engine. The engine writes before each launch, and the front reads when the
engine is gone: messages would add to the cost of a step, and the last one might never be sent.
"""

import mmap
import os
import struct
import tempfile
from collections.abc import Sequence
from typing import BinaryIO, cast

STEPS_UNDER_WAY = 2  # at most: settings.run_ahead is 1 or 0
MAX_SEQUENCES = 1 << 16  # in one step; further ones are not recorded
COUNT = struct.Struct("<Q")


class FlightRecorder:
    """Records sequences by the front's handles."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._next = 0
        self.steps = STEPS_UNDER_WAY  # that may be in flight at once

    @classmethod
    def create(cls) -> tuple["FlightRecorder", BinaryIO]:
        """A new recorder, and the unnamed file whose descriptor another process passes to open()."""
        # Without memfd_create the file is on a disk, and a full disk would harm the engine.
        has_memfd = hasattr(os, "memfd_create")
        file: BinaryIO
        file = os.fdopen(os.memfd_create("flight-recorder"), "w+b") if has_memfd else _temporary_file()
        file.truncate(STEPS_UNDER_WAY * _slot_bytes())
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


def _temporary_file() -> BinaryIO:
    return cast("BinaryIO", tempfile.TemporaryFile())  # the caller closes it


def _slot_bytes() -> int:
    return COUNT.size * (1 + MAX_SEQUENCES)
