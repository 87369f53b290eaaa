"""`trunkline serve` on a terminal: one plain line for each milestone, and logs in files."""

import asyncio
import errno
import json
import os
import pty
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import termios
import threading
from functools import partial
from pathlib import Path

import pytest

from tests.cluster.processes import alive, descendants, script, wait_until
from tests.worker.engine_rig import DEMO_MODEL
from trunkline_bench.servers.ports import free_port
from trunkline_cli import log_files
from trunkline_cli.console import LogConsole, QuietConsole, console, last_error
from trunkline_cli.launcher import Cluster
from trunkline_cli.log_files import LogFiles, log_folder
from trunkline_cli.plan import ClusterPlan, LaunchError

# Makes the terminal on standard input the controlling one, so that Ctrl-C becomes SIGINT, then executes a command.
WITH_TERMINAL = f"""
import fcntl, os, sys
fcntl.ioctl(0, {termios.TIOCSCTTY}, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""

STOP_S = 60.0  # for failures only


class Terminal:
    """A command on a pseudo-terminal of its own, and what it shows there.

    stops_writers: as after `stty tostop`, the terminal stops processes of background groups that write to it
    """

    def __init__(self, *command: str, environment: dict[str, str], stops_writers: bool = False) -> None:
        self._ours, theirs = pty.openpty()
        if stops_writers:
            attributes = termios.tcgetattr(theirs)
            attributes[3] |= termios.TOSTOP
            termios.tcsetattr(theirs, termios.TCSANOW, attributes)
        self.popen = subprocess.Popen(
            [sys.executable, "-c", WITH_TERMINAL, *command],
            stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, env={**os.environ, **environment},
        )  # fmt: skip
        os.close(theirs)
        self.shown = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                read = os.read(self._ours, 4096)
            except OSError:  # EIO: the last process that had the terminal has ended
                return
            self.shown += read.decode()

    def waits_for(self, text: str) -> None:
        wait_until(lambda: text in self.shown, f"it shows {text!r}", timeout_s=60)

    def press_ctrl_c(self) -> None:
        os.write(self._ours, b"\x03")

    def end(self) -> int:
        try:
            status = self.popen.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            raise
        self._reader.join(STOP_S)
        os.close(self._ours)
        return status


def test_a_terminal_shows_milestones_and_deaths_in_one_line_each_and_files_hold_the_logs(tmp_path: Path) -> None:
    port, folder = free_port(), tmp_path / "trunkline"
    terminal = Terminal(
        script("trunkline"), "serve", f"--model={DEMO_MODEL}", f"--port={port}", f"--worker-port={free_port()}",
        "--workers=1", "--threads=1", "--kv-blocks=64", environment={"XDG_STATE_HOME": str(tmp_path)},
    )  # fmt: skip
    try:
        terminal.waits_for("--stream")
        family = descendants(terminal.popen.pid)
        (engine,) = (pid for pid in family if b"engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes())
        assert (os.getsid(engine), os.getpgid(engine)) == (terminal.popen.pid, engine)
        os.kill(engine, signal.SIGKILL)
        terminal.waits_for("worker-0 died")
    finally:
        terminal.press_ctrl_c()
        status = terminal.end()
    assert status == 0
    assert not alive(family)
    folder = folder / f"127.0.0.1-{port}"
    expected = [
        rf"trunkline: loading tiny-tales with 1 worker; logs: {folder}",
        rf"trunkline: serving tiny-tales on 127\.0\.0\.1:{port}; 1 worker ready after \d+\.\d s",
        rf'trunkline: try: \S+ generate "Once upon a time" --stream --server 127\.0\.0\.1:{port}',
        rf"trunkline: worker-0 died \(exit status 1\): .*engine process died.*; starting it again in 0\.\d s; "
        rf"log: {folder}/worker-0\.log",
        r"\^C",
        r"trunkline: stopping",
    ]
    shown = terminal.shown.splitlines()
    assert len(shown) == len(expected), shown
    for line, pattern in zip(shown, expected, strict=True):
        assert re.fullmatch(pattern, line), (line, pattern)
    for name, event in (("worker-0", "worker ready"), ("router", "router listening")):
        lines = (folder / f"{name}.log").read_text().splitlines()
        assert any(json.loads(line)["event"] == event for line in lines if line.startswith("{"))


def logs(terminal: Terminal, pattern: str) -> bool:
    return re.search(pattern, terminal.shown) is not None


def test_processes_of_a_router_serve_on_a_terminal_that_stops_background_processes_which_write() -> None:
    terminal = Terminal(
        script("trunkline-router"), "--processes=2", "--port=0", "--http-port=-1", "--workers=127.0.0.1:1",
        environment={}, stops_writers=True,
    )  # fmt: skip
    try:
        for name in (r"127\.0\.0\.1:\d+/0", r"127\.0\.0\.1:\d+/1"):  # each logs its own
            wait_until(partial(logs, terminal, name), f"{name} logs", timeout_s=60)
        children = [pid for pid in descendants(terminal.popen.pid) if os.getpgid(pid) == pid]
        assert {os.getsid(pid) for pid in children} == {terminal.popen.pid}
    finally:
        terminal.press_ctrl_c()
        status = terminal.end()
    assert status == 0


@pytest.mark.parametrize(
    ("stdout", "stderr", "is_verbose", "kind"),
    [
        (True, True, False, QuietConsole),
        (True, True, True, LogConsole),
        (False, True, False, LogConsole),
        (True, False, False, LogConsole),
    ],
)
def test_only_a_terminal_without_verbose_is_quiet(
    monkeypatch: pytest.MonkeyPatch, stdout: bool, stderr: bool, is_verbose: bool, kind: type
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: stdout)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: stderr)
    assert type(console(is_verbose=is_verbose)) is kind


@pytest.mark.parametrize(
    ("lines", "shown"),
    [
        ([], "it printed nothing"),
        (['{"event": "worker ready", "level": "info"}'], "no error in its log"),
        (["Traceback (most recent call last):", "  raise", "ValueError: seven", ""], "ValueError: seven"),
        (
            [
                '{"event": "the engine process died", "level": "error", "service": "worker", "status": -9}',
                '{"event": "worker stopping", "level": "info"}',
            ],
            "the engine process died: status -9",
        ),
        (['{"event": "unexpected error", "level": "error", "exception": "Trace\\nKeyError: 1"}'],
         "unexpected error: exception KeyError: 1"),
        (["[1]"], "[1]"),
        (["\x1b[31mred\x1b[0m\tbell\a"], "[31mred [0m bell"),
        (["x" * 1000], "x" * 400 + "…"),
    ],
)  # fmt: skip
def test_the_last_error_of_a_log_is_shown_as_a_person_reads_it(lines: list[str], shown: str) -> None:
    assert last_error(lines) == shown


def test_log_files_begin_anew_keep_the_last_run_and_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_files, "MOST_BYTES", 30)
    (tmp_path / "worker-0.log").write_text("of an earlier cluster")
    logs = LogFiles(tmp_path)
    for number in range(10):
        logs.write("router", f"line {number} é")
    logs.write("worker-0", "one")
    assert {path.name for path in tmp_path.iterdir()} == {
        "router.log",
        "router.log.1",
        "worker-0.log",
        "worker-0.log.1",
    }
    assert (tmp_path / "worker-0.log").read_text() == "one\n"
    assert (tmp_path / "worker-0.log.1").read_text() == "of an earlier cluster"
    kept = (tmp_path / "router.log.1").read_text() + logs.path("router").read_text()
    assert kept.endswith("line 8 é\nline 9 é\n")
    assert len(kept) <= 2 * (30 + 10)


def test_a_full_disk_drops_log_lines_and_nothing_else(tmp_path: Path) -> None:
    logs = LogFiles(tmp_path / "gone")
    logs.write("router", "a line")
    assert list(tmp_path.iterdir()) == []


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    logs = LogFiles(tmp_path)
    logs.path("router").symlink_to(tmp_path / "precious")
    logs.write("router", "a line")
    assert (tmp_path / "precious").read_text() == "kept"


def test_logs_do_not_go_to_a_folder_that_others_may_write_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = log_folder("127.0.0.1-50051")
    assert folder == tmp_path / "trunkline" / "127.0.0.1-50051"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    LogFiles(folder).write("router", "a line")
    assert stat.S_IMODE((folder / "router.log").stat().st_mode) == 0o600
    folder.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert log_folder("127.0.0.1-50051").parent == tmp_path


def test_logs_go_to_a_temporary_folder_where_the_state_folder_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = log_folder("127.0.0.1-50051")
    assert folder.parent == tmp_path
    assert folder.is_dir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    with pytest.raises(LaunchError, match="there is no place for log files: "):
        log_folder("127.0.0.1-50051")


async def test_a_start_on_a_taken_port_leaves_the_logs_of_the_running_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        log = log_folder(f"127.0.0.1-{port}") / "router.log"
        log.write_text("a line")
        plan = ClusterPlan(DEMO_MODEL, "m", 1, "127.0.0.1", port, free_port())
        with pytest.raises(LaunchError, match="is taken"):
            await Cluster(plan, None, QuietConsole()).run(asyncio.Event())
    assert log.read_text() == "a line"


def test_a_terminal_that_is_gone_does_not_stop_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def write(self, _: str) -> int:
            raise OSError(errno.EIO, "Input/output error")

        flush = write

    monkeypatch.setattr(sys, "stderr", Gone())
    QuietConsole().stopping()
