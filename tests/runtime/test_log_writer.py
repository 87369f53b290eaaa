"""The log's own thread: what can be written is written in order, and what cannot be is dropped and counted."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.broken_logs import BROKEN_LOGS, MOST_FILE_BYTES, start
from tests.parameters import one_in
from trunkline_runtime.log_writer import MOST_WAITING_BYTES, LogWriter

LINE = "x" * 99
MANY = 3 * MOST_WAITING_BYTES // len(LINE)
DEADLINE_S = 60.0  # for failures only

# Prints how many lines were dropped to standard output, once all of them were.
PROGRAM = f"""
import sys, time
from trunkline_runtime.log import configure_logging, get_logger, num_dropped_lines
from trunkline_runtime.loop_lag import LoopLag
from trunkline_runtime.telemetry.process_families import CertificateExpiry, ProcessMetrics

configure_logging("test")
for number in range({MANY}):
    get_logger().info("{LINE}", number=number)
print("a line of another library", file=sys.stderr)
while not num_dropped_lines():
    time.sleep(0.001)
families = ProcessMetrics("test", LoopLag(), CertificateExpiry()).families()
((sample,),) = [family.samples for family in families if family.name == "trunkline_test_dropped_log_lines"]
print(sample.value)
"""


class Written:
    """A writer to a pipe whose reader may stall."""

    def __init__(self) -> None:
        self.resumed: list[int] = []
        self._has_resumed = threading.Event()
        read_end, write_end = os.pipe()
        self.reader = os.fdopen(read_end, "rb")
        self._writer_end = os.fdopen(write_end, "wb")
        self.writer = LogWriter(write_end, self._resume)
        self.writer.start()
        self.stream = self.writer.text()

    def _resume(self, num_lines: int) -> None:
        self.resumed.append(num_lines)
        self._has_resumed.set()

    def until_resumed(self) -> None:
        assert self._has_resumed.wait(DEADLINE_S)

    def close(self) -> list[bytes]:
        """Returns the lines that were not read."""
        reading = threading.Thread(target=lambda: left.extend(self.reader))
        left: list[bytes] = []
        reading.start()
        self.writer.end(DEADLINE_S)
        self._writer_end.close()
        reading.join()
        self.reader.close()
        return left


@pytest.fixture
def written() -> Iterator[Written]:
    made = Written()
    yield made
    if not made.reader.closed:
        made.close()


def test_lines_of_all_threads_are_written_whole_and_each_threads_in_order(written: Written) -> None:
    def print_lines(name: int) -> None:
        for number in range(500):
            written.stream.write(f"{name} {number}\n")

    threads = [threading.Thread(target=print_lines, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = [tuple(map(int, line.split())) for line in written.close()]
    assert len(lines) == 4 * 500
    for name in range(4):
        assert [number for one, number in lines if one == name] == list(range(500))
    assert written.writer.num_dropped == 0
    assert not written.resumed


def test_a_reader_that_stalls_costs_the_lines_that_do_not_fit_and_is_told_how_many(written: Written) -> None:
    for number in range(MANY):
        written.stream.write(f"{number} {LINE}\n")
    dropped = written.writer.num_dropped
    assert 0 < dropped < MANY
    read = [written.reader.readline() for _ in range(MANY - dropped)]
    written.until_resumed()
    written.stream.write("again\n")
    assert [*read, *written.close()] == [
        *(f"{number} {LINE}\n".encode() for number in range(MANY - dropped)), b"again\n",
    ]  # fmt: skip
    assert written.resumed == [dropped]
    assert written.writer.num_dropped == dropped


def test_a_line_that_a_full_file_took_in_part_does_not_spoil_the_next_one(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = (
        "import os, time\n"
        "from threading import Event\n"
        "from trunkline_runtime.log_writer import LogWriter\n"
        "resumed = Event()\n"
        "writer = LogWriter(2, lambda num_lines: (print(num_lines), resumed.set()))\n"
        "writer.start()\n"
        "writer.write(b'one\\ntwo two two\\nthree\\n')\n"
        "while writer.num_dropped < 2: time.sleep(0.001)\n"
        f"os.truncate({str(log)!r}, os.stat({str(log)!r}).st_size - 6)\n"
        "writer.write(b'ok\\n')\n"
        "resumed.wait()\n"
    )
    with BROKEN_LOGS["file at its limit"](tmp_path) as stderr, (tmp_path / "out").open("w+b") as out:
        process = start(sys.executable, "-c", program, stderr=stderr, stdout=out.fileno())
        assert process.wait(DEADLINE_S) == 0
        out.seek(0)
        assert out.read() == b"2\n"
    with log.open("rb") as file:
        file.seek(MOST_FILE_BYTES - 10)
        assert file.read() == b"one\n\nok\n"


@pytest.mark.parametrize("kind", one_in(3, BROKEN_LOGS))
def test_a_process_runs_to_its_end_and_the_metric_counts_what_was_lost(kind: str, tmp_path: Path) -> None:
    with BROKEN_LOGS[kind](tmp_path) as stderr, (tmp_path / "out").open("w+b") as out:
        process = start(sys.executable, "-c", PROGRAM, stderr=stderr, stdout=out.fileno())
        assert process.wait(DEADLINE_S) == 0
        out.seek(0)
        assert float(out.read()) > 0


@pytest.mark.parametrize(
    ("ending", "status", "last"),
    [
        ("sys.exit(3)", 3, "logged"),
        ("sys.exit('the reason')", 1, "the reason"),
        ("raise KeyError('a bug')", 1, "KeyError: 'a bug'"),
        ("warnings.warn('careful')", 0, "UserWarning: careful"),
        ("logging.getLogger('asyncio').error('of the library')", 0, "of the library"),
    ],
)
def test_the_last_lines_of_a_process_are_written_in_order(ending: str, status: int, last: str) -> None:
    program = f"""
import logging, sys, warnings
from trunkline_runtime.log import configure_logging, get_logger

configure_logging("test")
for _ in range(100):
    get_logger().info("logged")
{ending}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    lines = done.stderr.splitlines()
    assert done.returncode == status
    assert len([line for line in lines if '"logged"' in line]) == 100
    assert last in lines[-1]
