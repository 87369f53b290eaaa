"""A cluster of real processes on free ports: what the end-to-end tests talk to."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakSet

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from trunkline.v1.fleet_pb2 import ExplainRouteRequest
from trunkline.v1.fleet_pb2_grpc import FleetServiceStub
from trunkline.v1.inference_pb2 import GenerateRequest, ListModelsRequest, TokenIds
from trunkline.v1.inference_pb2_grpc import InferenceServiceStub
from trunkline.v1.worker_pb2_grpc import WorkerServiceStub
from trunkline_bench.servers.ports import free_port

START_S = 120.0  # to start, and for all else that only a failing test waits for
STOP_S = 10.0  # after SIGTERM; then a process is killed
# open() of a file in /proc fails with FileNotFoundError once the process has ended. If the process ends between open()
# and read(), read() fails with ESRCH, which is ProcessLookupError.
ENDED = (FileNotFoundError, ProcessLookupError)


def script(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


class Process:
    """A running command; what it prints is kept."""

    known: ClassVar["WeakSet[Process]"] = WeakSet()

    def __init__(self, *command: str, environment: dict[str, str] | None = None) -> None:
        self.name = Path(command[0]).name
        self.popen = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,  # not a session: Linux may divide the processor between sessions
            env={**os.environ, **(environment or {})},
        )
        self.lines: list[str] = []
        self.known.add(self)
        self._printed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            with self._printed:
                self.lines.append(line.rstrip())
                self._printed.notify_all()

    def wait_for(self, pattern: str, timeout_s: float = START_S) -> str:
        """The first printed line that matches."""

        def find() -> str | None:
            return next((line for line in self.lines if re.search(pattern, line)), None)

        with self._printed:
            self._printed.wait_for(find, timeout_s)
        found = find()
        assert found is not None, f"never printed {pattern!r}:\n" + "\n".join(self.lines[-20:])
        return found

    def wait(self, timeout_s: float = START_S) -> int:
        """The exit status, everything printed read."""
        status = self.popen.wait(timeout_s)
        self._reader.join(STOP_S)
        return status

    def stop(self) -> None:
        if self.popen.poll() is None:
            self.popen.terminate()
            try:
                self.popen.wait(STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(self.popen.pid, signal.SIGKILL)
        self.wait()
        assert self.popen.stdout is not None
        self.popen.stdout.close()


class Worker:
    """A `trunkline-worker`, ready."""

    def __init__(
        self,
        model: Path,
        *arguments: str,
        port: int = 0,
        environment: dict[str, str] | None = None,
        command: Sequence[str] = (),
    ) -> None:
        self.port = port or free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.process = Process(
            *(command or [script("trunkline-worker")]),
            f"--model={model}",
            f"--port={self.port}",
            "--threads=1",
            "--device=cpu",
            *arguments,
            environment=environment,
        )
        self.channel = grpc.insecure_channel(self.address, options=[("grpc.use_local_subchannel_pool", 1)])
        self.stub: Any = WorkerServiceStub(self.channel)

    def wait_ready(self) -> "Worker":
        self.process.wait_for("worker ready")
        return self

    def engine_pid(self) -> int:
        """The worker's only child."""
        children = Path(f"/proc/{self.process.popen.pid}/task/{self.process.popen.pid}/children").read_text().split()
        assert len(children) == 1
        return int(children[0])

    def health(self, service: str) -> int:
        answer = health_pb2_grpc.HealthStub(self.channel).Check(
            health_pb2.HealthCheckRequest(service=service), timeout=60
        )
        status: int = answer.status
        return status

    def load(self) -> Any:
        """The newest load sample."""
        from trunkline.v1.worker_pb2 import WatchCacheRequest

        call = self.stub.WatchCache(WatchCacheRequest(), timeout=60)
        try:
            return next(item.load for item in call if item.WhichOneof("item") == "load")
        finally:
            call.cancel()

    def stop(self) -> None:
        self.channel.close()
        self.process.stop()


class Cluster:
    """A router before workers, all ready."""

    def __init__(self, router: Process, address: str, workers: list[Worker]) -> None:
        self.router = router
        self.address = address
        self.workers = workers
        self.channel = grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        self.stub: Any = InferenceServiceStub(self.channel)

    def worker(self, worker_id: str) -> Worker:
        return next(worker for worker in self.workers if worker.address == worker_id)

    def matched(self, prompt: Sequence[int]) -> dict[str, int]:
        """How many tokens of a prompt each worker holds, as far as the router has heard."""
        request = GenerateRequest(token_ids=TokenIds(ids=prompt))
        fleet: Any = FleetServiceStub(self.channel)
        answer = fleet.ExplainRoute(ExplainRouteRequest(request=request), timeout=START_S)
        return {candidate.worker_id: candidate.matched_tokens for candidate in answer.candidates}

    def wait_ready(self, count: int) -> None:
        def ready() -> bool:
            models = self.stub.ListModels(ListModelsRequest(), wait_for_ready=True, timeout=START_S).models
            return bool(sum(model.ready_workers for model in models) == count)

        wait_until(ready, "all workers are connected")


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = START_S) -> None:
    """Polls what another process does; the time-out is for failures only."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        threading.Event().wait(0.02)


@contextmanager
def running_cluster(
    model: Path,
    *arguments: str,
    workers: int = 2,
    environment: dict[str, str] | None = None,
    command: Sequence[str] = (),
) -> Iterator[Cluster]:
    """`arguments` and `environment` are for the workers and, the latter, for the router too."""
    with ExitStack() as stack:
        started = [Worker(model, *arguments, environment=environment, command=command) for _ in range(workers)]
        for worker in started:
            stack.callback(worker.stop)
        port = free_port()
        addresses = ",".join(worker.address for worker in started)
        router = Process(
            script("trunkline-router"), f"--workers={addresses}", f"--port={port}", environment=environment
        )
        stack.callback(router.stop)
        router.wait_for("router listening")
        cluster = Cluster(router, f"127.0.0.1:{port}", started)
        stack.callback(cluster.channel.close)
        cluster.wait_ready(workers)
        yield cluster


@dataclass(frozen=True, slots=True)
class Served:
    """A running `trunkline serve` with the demo model and one worker."""

    process: Process
    address: str  # of gRPC
    http: str  # host:port
    metrics: str  # host:port of the worker's metrics

    def at_its_ports(self, text: str) -> str:
        """A part of a document about `make serve`, with the ports of this cluster."""
        return text.replace("127.0.0.1:50051", self.address).replace("localhost:8000", self.http)


@contextmanager
def running_serve(model: Path) -> Iterator[Served]:
    """What `make serve` runs, on free ports."""
    port, http_port, metrics_port = free_port(), free_port(), free_port()
    process = Process(
        script("trunkline"), "serve", f"--model={model}", "--workers=1", f"--port={port}", f"--http-port={http_port}",
        f"--worker-port={free_port()}", f"--metrics-port={metrics_port}",
    )  # fmt: skip
    try:
        process.wait_for(r"^Serving ")
        yield Served(process, *(f"127.0.0.1:{at}" for at in (port, http_port, metrics_port)))
    finally:
        process.stop()


def children(pid: int) -> list[int]:
    """The processes that one has started, and that have not ended; none if it has ended itself."""
    found: list[int] = []
    with suppress(*ENDED):  # the process
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            with suppress(*ENDED):  # the thread
                found += map(int, task.read_text().split())
    return found


def descendants(pid: int) -> set[int]:
    """All processes below one, itself included."""
    found, queue = set(), [pid]
    while queue:
        one = queue.pop()
        found.add(one)
        queue += children(one)
    return found


def alive(pids: set[int]) -> set[int]:
    def runs(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
        except ENDED:
            return False

    return {pid for pid in pids if runs(pid)}


def resident_bytes(pid: int) -> int:
    """Memory of a process; 0 if it has ended."""
    try:
        return 1024 * int(Path(f"/proc/{pid}/status").read_text().partition("VmRSS:")[2].split()[0])
    except (*ENDED, IndexError):
        return 0


def stop_still(pid: int) -> None:
    """Sends SIGSTOP. Returns when the process stands still: until then it may take what is sent to it."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T", "it stands still")
