"""Writes what a process prints on a thread of its own, so that nothing waits for a disk or a reader.

What cannot be written is dropped and counted: the queue is bounded, and an error of the system ends no request.
"""

import atexit
import io
import os
import queue
import select
import threading
from collections.abc import Callable
from typing import Any, BinaryIO, cast

MOST_WAITING_BYTES = 1 << 20  # some 2,000 lines
GATHER_S = 0.01  # between two writes, so that a busy process wakes the thread less often
LAST_LINES_S = 1.0  # time for what waits when the process ends


class LogWriter(io.RawIOBase):
    """A bounded queue of lines before a file descriptor. write() may be called on any thread, and returns at once.

    on_resumed: called by the writing thread with the number of lines that were dropped, once a write succeeds again
    """

    def __init__(self, descriptor: int, on_resumed: Callable[[int], object]) -> None:
        self.num_dropped = 0  # lines so far
        self._descriptor = descriptor
        self._on_resumed = on_resumed
        self._num_reported = 0  # of the dropped lines
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()  # put() is safe in destructors too
        self._waiting_bytes = 0  # with what is being written
        self._counting = threading.RLock()  # a destructor that prints may interrupt a thread that holds it
        self._streams: list[io.TextIOWrapper] = []
        self._is_ending = threading.Event()
        self._is_torn = False  # whether the last line was written in part
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)

    def start(self) -> None:
        """Begins to write, unless it has. What waits when the process ends is still written, for a short time."""
        if self._thread.ident is None:
            self._thread.start()
            atexit.register(self.end)

    def end(self, within_s: float = LAST_LINES_S) -> None:
        """Returns when what waits is written, or after this time. Later lines are lost."""
        for stream in self._streams:
            stream.flush()  # a text without a line's end
        self._is_ending.set()
        self._lines.put(b"")
        self._thread.join(within_s)

    def text(self) -> io.TextIOWrapper:
        """Returns a stream to print to. Each of its lines is queued as a whole."""
        raw = cast(BinaryIO, self)
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)
        self._streams.append(stream)
        return stream

    def write(self, data: Any, /) -> int:
        """See RawIOBase: queues bytes, or drops them. Never raises OSError."""
        lines = bytes(data)
        with self._counting:
            is_full = self._waiting_bytes + len(lines) > MOST_WAITING_BYTES
            if is_full:
                self.num_dropped += _num_lines(lines)
            else:
                self._waiting_bytes += len(lines)
        if not is_full:
            self._lines.put(lines)
        return len(lines)

    def writable(self) -> bool:
        """See RawIOBase."""
        return True

    def fileno(self) -> int:
        """See RawIOBase."""
        return self._descriptor

    def isatty(self) -> bool:
        """See RawIOBase."""
        return os.isatty(self._descriptor)

    def _run(self) -> None:
        while not (self._is_ending.is_set() and self._lines.empty()):
            first = self._lines.get()
            lines = first + b"".join(self._lines.get() for _ in range(self._lines.qsize()))
            left = self._write_now(lines)
            with self._counting:
                self._waiting_bytes -= len(lines)
                self.num_dropped += _num_lines(left)
            if lines and not left and self.num_dropped > self._num_reported:
                num_new, self._num_reported = self.num_dropped - self._num_reported, self.num_dropped
                self._on_resumed(num_new)
            self._is_ending.wait(GATHER_S)

    def _write_now(self, lines: bytes) -> bytes:
        """Writes as much as it can. Returns the rest."""
        written = 0
        try:
            if self._is_torn:
                os.write(self._descriptor, b"\n")
                self._is_torn = False
            while written < len(lines):
                try:
                    written += os.write(self._descriptor, lines[written:])
                except BlockingIOError:  # another program has made the pipe that they share non-blocking
                    writable = select.poll()
                    writable.register(self._descriptor, select.POLLOUT)
                    writable.poll()
        except OSError:
            self._is_torn |= written > 0 and not lines[:written].endswith(b"\n")
        return lines[written:]


def _num_lines(printed: bytes) -> int:
    return printed.count(b"\n")
