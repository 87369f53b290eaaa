"""Runs one stage in a process group of its own, with a time limit, and passes its rows on as they are measured.

After a device error no further use of the device works in the same process, and a hang never ends. With a process per
stage, neither affects other stages. This module needs only the standard library.
"""

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trunkline_bench.gpu.stages import Stage

READ_BYTES = 1 << 16
POLL_S = 0.2
# A process over its limit gets SIGABRT, and has this time to write its stacks.
STACKS_S = 5.0
KERNELS = "trunkline_kernels"
# How faulthandler and Python print a frame, and how compute-sanitizer names a kernel.
FRAME = re.compile(rf'File "[^"]*({KERNELS}[^"]*)", line (\d+),? in (\S+)')
SANITIZED = re.compile(r"=========\s+at (\S+?)\+0x")
TAIL_LINES = 40

Row = dict[str, Any]


@dataclass(slots=True)
class Ending:
    """How a stage's process ended."""

    seconds: float = 0.0
    error: str = ""  # empty: success
    kernel: str = ""  # place of the device error, or of the frame in which the process died
    is_of_device: bool = False  # a device error, or death by a signal that this program did not send
    facts: Row = field(default_factory=dict)
    has_gpu: bool = True


def run_stage(
    stage: Stage,
    arguments: Sequence[str],
    log: Path,
    *,
    limit_s: float,
    on_row: Callable[[Row], None],
    environment: Mapping[str, str] = os.environ,
    under: Sequence[str] = (),
) -> Ending:
    """Runs a stage until it ends, or until its limit.

    arguments: of trunkline_bench.gpu.stage_main; log: file for what the stage prints, including stacks; under: a
    command that runs the stage's command, such as compute-sanitizer
    """
    ending, started_s = Ending(), time.monotonic()
    reading, writing = os.pipe()
    command = [*under, sys.executable, "-m", "trunkline_bench.gpu.stage_main", stage.function]
    with (
        log.open("wb") as printed,
        _running([*command, f"--rows={writing}", *arguments], printed.fileno(), writing, environment) as process,
    ):
        os.close(writing)

        def take(line: bytes) -> None:
            said = json.loads(line)
            if "row" in said:
                on_row(said["row"])
            elif "facts" in said:
                ending.facts = said["facts"]
            elif "no_gpu" in said:
                ending.has_gpu = False
            else:
                ending.error, ending.kernel = said["failed"], said["kernel"]
                ending.is_of_device = said["of_device"]

        in_time = _read_lines(reading, process, started_s + limit_s, take)
        os.close(reading)
        if not in_time:
            ending.error = f"not done after its limit of {limit_s:.0f} s"
            os.killpg(process.pid, signal.SIGABRT)
        try:
            status = process.wait(STACKS_S)
        except subprocess.TimeoutExpired:
            status = 0
    ending.seconds = time.monotonic() - started_s
    text = log.read_text(errors="replace")
    if in_time and status and not ending.error:
        ending.is_of_device = status < 0
        ending.error = f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    if ending.error and not ending.kernel:
        ending.kernel = _kernel(text)
    if ending.error:
        print("\n".join(text.splitlines()[-TAIL_LINES:]), flush=True)
    return ending


@contextmanager
def _running(
    command: Sequence[str], output: int, rows: int, environment: Mapping[str, str]
) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that leads a group. The context kills the whole group at its end."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=(rows,), start_new_session=True,
        env=environment,
    )  # fmt: skip
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):  # the whole group has ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read_lines(
    reading: int, process: "subprocess.Popen[bytes]", until_s: float, take: Callable[[bytes], None]
) -> bool:
    """Passes each line to `take` until the process has ended. Returns False if it has not ended by `until_s`."""
    rest = b""
    is_open = True
    while time.monotonic() < until_s:
        ended = process.poll() is not None
        while is_open and select.select([reading], [], [], 0.0 if ended else POLL_S)[0]:
            read = os.read(reading, READ_BYTES)
            is_open = bool(read)
            *lines, rest = (rest + read).split(b"\n")
            for line in lines:
                take(line)
        if ended:
            return True
        if not is_open:
            time.sleep(POLL_S)  # the stage has closed its end, and its process is about to end
    return False


def _kernel(text: str) -> str:
    """The kernel that a log names, or "". compute-sanitizer names the kernel itself; a stack names its launcher."""
    if found := SANITIZED.search(text):
        return found[1]
    # Python prints the innermost frame last, faulthandler first; faulthandler begins with the current thread.
    frames = list(FRAME.finditer(text))
    if not frames:
        return ""
    innermost = frames[0] if "most recent call first" in text else frames[-1]
    return f"{innermost[1]}:{innermost[2]} in {innermost[3]}"
