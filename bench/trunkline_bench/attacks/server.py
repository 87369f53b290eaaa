"""A real router or worker whose memory and event loop are watched while it is attacked."""

import asyncio
import contextlib
from pathlib import Path

from trunkline_bench.attacks.watched_server import LoopLag, lag_between
from trunkline_bench.faults.fleet import FleetError, Process
from trunkline_bench.servers.ports import free_port

READY = {"router": "router listening", "worker": "worker ready"}
PAGES_PER_MIB = 256
WORKER_FLAGS = ("--threads=1", "--device=cpu", "--stats-interval-s=0", "--kv-blocks=8192", "--drain-timeout-s=1")


class Server:
    """A router or worker process. `kind`: "router" or "worker"; `folder`: for the file with the lag of its event loop.

    restarts: start it again whenever it ends, as the launcher or Kubernetes does
    """

    def __init__(
        self, kind: str, folder: Path, *flags: str, environment: dict[str, str] | None = None, restarts: bool = False
    ) -> None:
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._kind, self._restarts = kind, restarts
        self._lag_file = folder / f"{kind}-{self.port}"
        watched = ("-m", "trunkline_bench.attacks.watched_server", str(self._lag_file), kind)
        self._process = Process("python", *watched, f"--port={self.port}", *flags, environment=environment)
        self._keeping: asyncio.Task[None] | None = None
        self.ends = 0  # how often the process has ended by itself

    async def start(self) -> None:
        """Returns when the server is ready. Raises FleetError."""
        await self._process.start()
        await self._process.wait_for(READY[self._kind])
        if self._restarts:
            self._keeping = asyncio.create_task(self._keep())

    async def stop(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeping
        await self._process.stop()

    def stop_reading(self) -> None:
        """What the server prints is not read any more until it is stopped."""
        self._process.stop_reading()

    def rss_mib(self) -> float:
        """Resident memory. Raises FleetError if the process has died."""
        try:
            return int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]) / PAGES_PER_MIB
        except FileNotFoundError:
            raise FleetError(f"the {self._kind} has died:\n" + "\n".join(self._process.lines[-5:])) from None

    def lag(self, from_s: float, to_s: float) -> LoopLag:
        """The longest lag between two times of the system's monotonic clock."""
        return lag_between(self._lag_file, from_s, to_s)

    async def _keep(self) -> None:
        while True:
            await self._process.ended()
            self.ends += 1
            await self._process.start()
            await self._process.wait_for(READY[self._kind])
