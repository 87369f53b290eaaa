"""A fleet of real processes for fault injection: routers, and workers behind proxies."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from trunkline.client.client import Client
from trunkline.proof import Metadata, proof_metadata
from trunkline.v1.worker_pb2 import DrainRequest, GetModelRequest, LoadSample, WatchCacheRequest
from trunkline.v1.worker_pb2_grpc import WorkerServiceStub
from trunkline_bench.faults.proxy import Proxy
from trunkline_bench.servers.ports import free_port

START_S = 120.0  # for failures only
STOP_S = 10.0
LOG_LINES = 400  # kept per process for error messages


class FleetError(Exception):
    """The fleet misbehaves. The message has one line, and the last lines that the process printed."""


class Process:
    """A process of one of our console scripts, and the lines that it prints."""

    def __init__(self, name: str, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self.name = name
        self._command = (str(Path(sys.executable).with_name(name)), *arguments)
        self._environment = {**os.environ, **(environment or {})}
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self.lines: list[str] = []
        self._printed = asyncio.Condition()

    async def start(self) -> None:
        self.lines.clear()
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            process_group=0,  # not a session: Linux may divide the processor between sessions
            env=self._environment,
        )
        self._reading = asyncio.create_task(self._read(self._process))

    async def wait_for(self, text: str) -> None:
        """Returns when a line with this text has been printed. Raises FleetError if that takes too long."""

        def found() -> bool:
            return any(text in line for line in self.lines)

        try:
            async with asyncio.timeout(START_S), self._printed:
                await self._printed.wait_for(found)
        except TimeoutError:
            raise FleetError(f"{self.name} never printed {text!r}:\n" + "\n".join(self.lines[-20:])) from None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def ended(self) -> int:
        assert self._process is not None
        return await self._process.wait()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def stop_reading(self) -> None:
        """What the process prints is not read any more until stop()."""
        assert self._reading is not None
        self._reading.cancel()

    async def stop(self) -> None:
        """Sends SIGTERM, and SIGKILL to the process group if the process has not ended after STOP_S."""
        if self._process is None:
            return
        if self._reading is not None and self._reading.cancelled():
            self._reading = asyncio.create_task(self._read(self._process))
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            try:
                async with asyncio.timeout(STOP_S):
                    await self._process.wait()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                await self._process.wait()
        if self._reading is not None:
            await self._reading

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            async with self._printed:
                self.lines.append(line.decode(errors="replace").rstrip())
                del self.lines[:-LOG_LINES]
                self._printed.notify_all()


class Worker:
    """A worker behind a proxy. It is started again whenever it ends, as the launcher or Kubernetes does."""

    def __init__(self, model: Path, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self.port = free_port()
        self.proxy = Proxy(self.port)
        self.starts = 0
        flags = (f"--model={model}", f"--port={self.port}", "--threads=1", "--device=cpu", "--stats-interval-s=0")
        self.process = Process("trunkline-worker", *flags, *arguments, environment=environment)
        self._grant_key = (environment or {}).get("TRUNKLINE_GRANT_KEY", "").encode()
        self._keeping: asyncio.Task[None] | None = None
        self._channel: grpc.aio.Channel | None = None

    @property
    def worker_id(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        await self.proxy.start()
        await self.process.start()
        await self.process.wait_for("worker ready")
        self.starts = 1
        self._channel = grpc.aio.insecure_channel(self.worker_id, options=(("grpc.max_reconnect_backoff_ms", 500),))
        self._keeping = asyncio.create_task(self._keep())

    async def stop(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close()
        if self.process.is_running:
            self.resume()
            await self.process.stop()
        await self.proxy.stop()

    @property
    def stub(self) -> Any:
        assert self._channel is not None
        return WorkerServiceStub(self._channel)

    def engine_pid(self) -> int:
        """Pid of the engine, the only child of the front process."""
        pid = self.process.pid
        (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(child)

    def kill_engine(self) -> None:
        os.kill(self.engine_pid(), signal.SIGKILL)

    def kill_front(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)

    def hang_engine(self) -> None:
        os.kill(self.engine_pid(), signal.SIGSTOP)

    def hang_front(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Continues the engine and the front if they are stopped."""
        with contextlib.suppress(OSError, ValueError):
            os.kill(self.engine_pid(), signal.SIGCONT)
        with contextlib.suppress(OSError):
            os.kill(self.process.pid, signal.SIGCONT)

    async def drain(self, timeout_s: float) -> tuple[int, int]:
        """Drains the worker. Returns how many choices finished, and how many were handed over."""
        request = DrainRequest()
        request.timeout.FromNanoseconds(int(timeout_s * 1e9))
        answer = await self.stub.Drain(request, metadata=await self.proof("Drain"))
        return answer.finished, answer.aborted

    async def proof(self, method: str) -> Metadata:
        """Metadata that authorizes a call of this method; empty without a grant key."""
        if not self._grant_key:
            return ()
        model = await self.stub.GetModel(GetModelRequest(), timeout=START_S, wait_for_ready=True)
        now_unix_ms = int(time.time() * 1e3)
        return proof_metadata(
            self._grant_key, method, worker_id=model.worker_id, epoch=model.epoch, now_unix_ms=now_unix_ms
        )

    async def restart(self) -> None:
        """Sends SIGTERM, after which the worker is started again. Returns when it is ready. Raises FleetError."""
        starts = self.starts
        os.kill(self.process.pid, signal.SIGTERM)
        await until(lambda: self.starts > starts, f"{self.worker_id} is back")

    async def load(self) -> LoadSample:
        """The newest load sample. Raises FleetError if the worker sends none."""
        proof = await self.proof("WatchCache")
        call = self.stub.WatchCache(WatchCacheRequest(), timeout=START_S, wait_for_ready=True, metadata=proof)
        try:
            async for item in call:
                if item.WhichOneof("item") == "load":
                    return LoadSample.FromString(item.load.SerializeToString())
        finally:
            call.cancel()
        raise FleetError(f"{self.worker_id} sent no load sample")

    async def _keep(self) -> None:
        while True:
            await self.process.ended()
            await self.process.start()
            await self.process.wait_for("worker ready")
            self.starts += 1


@dataclass(frozen=True, slots=True)
class Fleet:
    """Workers and routers. `routers[i]` listens at `addresses[i]`, and `clients[i]` calls it."""

    workers: list[Worker]
    routers: list[Process]
    clients: list[Client]
    addresses: list[str]

    def worker(self, worker_id: str) -> Worker:
        return next(worker for worker in self.workers if worker.worker_id == worker_id)

    async def all_ready(self) -> None:
        """Returns when every router reports all workers as ready."""
        for client in self.clients:
            async with asyncio.timeout(START_S):
                while True:
                    models = await client.list_models()
                    if sum(model.ready_workers for model in models) == len(self.workers):
                        break
                    await asyncio.sleep(0.02)

    async def restart_routers(self) -> None:
        """Starts the routers that have ended. Returns when all are ready."""
        for router, client in zip(self.routers, self.clients, strict=True):
            if not router.is_running:
                await router.start()
                await router.wait_for("router listening")
            await client.ready(START_S)

    async def nothing_live(self) -> None:
        """Returns when no worker holds KV blocks for any request. Raises TimeoutError."""
        for worker in self.workers:
            async with asyncio.timeout(START_S):
                while True:
                    load = await worker.load()
                    if not (load.kv_live_blocks or load.running or load.waiting):
                        break
                    await asyncio.sleep(0.02)


@asynccontextmanager
async def running_fleet(
    model: Path,
    *arguments: str,
    workers: int = 3,
    routers: int = 1,
    router_arguments: tuple[str, ...] = (),
    environment: dict[str, str] | None = None,
) -> AsyncIterator[Fleet]:
    """Starts workers and routers; stops them at the end. `arguments` and `environment` are for the workers."""
    async with contextlib.AsyncExitStack() as stack:
        made = [Worker(model, *arguments, environment=environment) for _ in range(workers)]
        for worker in made:
            stack.push_async_callback(worker.stop)
        await asyncio.gather(*(worker.start() for worker in made))
        yield await stack.enter_async_context(routers_before(made, routers, *router_arguments))


@asynccontextmanager
async def routers_before(
    workers: list[Worker], count: int, *arguments: str, name: str = "router"
) -> AsyncIterator[Fleet]:
    """Starts `count` routers for running workers. `name`: prefix of the router ids."""
    addresses = ",".join(f"127.0.0.1:{worker.proxy.port}" for worker in workers)
    async with contextlib.AsyncExitStack() as stack:
        processes, clients = [], []
        router_addresses = [f"127.0.0.1:{free_port()}" for _ in range(count)]
        for number, address in enumerate(router_addresses):
            router = Process(
                "trunkline-router",
                f"--workers={addresses}",
                f"--port={address.rpartition(':')[2]}",
                f"--router-id={name}-{number}",
                *arguments,
            )
            stack.push_async_callback(router.stop)
            await router.start()
            processes.append(router)
            clients.append(await stack.enter_async_context(Client(address, retries=0)))
        for router in processes:
            await router.wait_for("router listening")
        for client in clients:
            await client.ready(START_S)
        fleet = Fleet(workers, processes, clients, router_addresses)
        await fleet.all_ready()
        yield fleet


async def until(condition: Callable[[], bool], what: str) -> None:
    """Polls until the condition holds. Raises FleetError if that takes too long."""
    try:
        async with asyncio.timeout(START_S):
            while not condition():  # noqa: ASYNC110  # another process has no event to wait for
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise FleetError(f"never: {what}") from None
