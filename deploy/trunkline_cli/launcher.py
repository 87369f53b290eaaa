"""`trunkline serve`: one router and several workers on this machine, started, watched, and stopped together."""

import asyncio
import errno
import os
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from random import Random

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from trunkline.client import Client
from trunkline.errors import TrunklineError
from trunkline_cli.backoff import Backoff
from trunkline_cli.child import Child, describe_status, script
from trunkline_cli.gpus import gpu_environment, shared_fraction

MOST_PORT = 65_535
POLL_S = 0.1  # between looks at whether a process is ready
STOP_S = 4.0  # processes have this long to stop; what is left is killed, so that all is over within 5 s


class LaunchError(Exception):
    """The cluster cannot start. One line for a person."""


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """What to start."""

    model: Path
    name: str
    workers: int
    host: str
    port: int  # the router's
    worker_port: int  # the first worker's; the others follow
    worker_arguments: tuple[str, ...] = ()
    threads: int | None = None  # per worker
    tenants: str = ""  # a file for the router
    gpus: tuple[str, ...] = ()

    def worker_address(self, index: int) -> str:
        return address(self.host, self.worker_port + index)

    @property
    def router_address(self) -> str:
        return address(self.host, self.port)

    def ports(self) -> list[int]:
        """The router's and the workers'. Raises LaunchError where they are not ports, or one is meant twice."""
        workers = range(self.worker_port, self.worker_port + self.workers)
        for port in (self.port, workers[0], workers[-1]):
            if not 1 <= port <= MOST_PORT:
                raise LaunchError(f"port {port} is out of range; allowed: 1 to {MOST_PORT}")
        if self.port in workers:
            raise LaunchError(
                f"port {self.port} is the router's and also one of the workers' {workers[0]} to {workers[-1]}"
            )
        return [self.port, *workers]

    def worker_command(self, index: int) -> list[str]:
        shared_out = max(1, (os.cpu_count() or 1) // self.workers)
        threads = shared_out if self.threads is None else self.threads
        fraction = shared_fraction(self.gpus, self.workers, index)
        return [
            script("trunkline-worker"),
            f"--model={self.model}",
            f"--served-model-name={self.name}",
            f"--host={self.host}",
            f"--port={self.worker_port + index}",
            f"--worker-id=worker-{index}",
            f"--threads={threads}",
            "--drain-timeout-s=2",
            *([] if fraction is None else [f"--kv-memory-fraction={fraction}"]),
            *self.worker_arguments,
        ]

    def environment(self, name: str) -> dict[str, str]:
        """What a process's environment adds."""
        return gpu_environment(self.gpus, int(name.removeprefix("worker-"))) if name.startswith("worker-") else {}

    def router_command(self) -> list[str]:
        addresses = ",".join(self.worker_address(index) for index in range(self.workers))
        return [
            script("trunkline-router"),
            f"--workers={addresses}",
            f"--host={self.host}",
            f"--port={self.port}",
            "--stop-timeout-s=2",
            *([f"--tenants={self.tenants}"] if self.tenants else []),
        ]


class Cluster:
    """The processes of a plan."""

    def __init__(self, plan: ClusterPlan) -> None:
        self._plan = plan
        self._children: dict[str, Child] = {}
        self._rng = Random()

    async def run(self, stop: asyncio.Event) -> None:
        """Starts everything, says how to use it, and keeps it running until `stop`. Raises LaunchError."""
        plan = self._plan
        for port in plan.ports():
            check_port(plan.host, port)
        commands = {f"worker-{index}": plan.worker_command(index) for index in range(plan.workers)}
        commands["router"] = plan.router_command()
        supervisors: list[asyncio.Task[None]] = []
        stopped = asyncio.create_task(stop.wait())
        try:
            for name, command in commands.items():
                try:
                    self._children[name] = await Child.start(name, command, plan.environment(name))
                except OSError as error:
                    raise LaunchError(f"{name} cannot be started: {command[0]}: {error.strerror}") from None
            starting = asyncio.create_task(self._wait_until_ready())
            deaths = {asyncio.create_task(child.wait()): child for child in self._children.values()}
            done, _ = await asyncio.wait({starting, stopped, *deaths}, return_when=asyncio.FIRST_COMPLETED)
            dead = [child for task, child in deaths.items() if task in done]
            if stopped not in done and dead:
                starting.cancel()
                raise LaunchError(f"{dead[0].name} did not start: {dead[0].last_line}")
            if stopped in done:
                starting.cancel()
                return
            starting.result()
            self._announce()
            supervisors = [asyncio.create_task(self._supervise(name, command)) for name, command in commands.items()]
            await stopped
        finally:
            for task in supervisors:
                task.cancel()
            await self._stop_all()

    async def _wait_until_ready(self) -> None:
        plan = self._plan
        addresses = {f"worker-{index}": plan.worker_address(index) for index in range(plan.workers)}
        for name, address in addresses.items():
            await wait_until_serving(address)
            say(f"{name} is ready on {address}")
        async with Client(plan.router_address) as client:
            while True:
                try:
                    models = await client.list_models()
                except TrunklineError:
                    models = []
                if sum(model.ready_workers for model in models) == plan.workers:
                    say(f"router is ready on {plan.router_address}")
                    return
                await asyncio.sleep(POLL_S)

    async def _supervise(self, name: str, command: list[str]) -> None:
        """Starts a process again whenever it dies, after a growing delay."""
        backoff = Backoff(self._rng)
        while True:
            child = self._children[name]
            status = await child.wait()
            child.kill_group()
            delay_s = backoff.after_death(asyncio.get_running_loop().time() - child.started_s)
            say(f"{name} died ({describe_status(status)}): {child.last_line}; starting it again in {delay_s:.1f} s")
            await asyncio.sleep(delay_s)
            self._children[name] = await start_again(name, command, backoff, self._plan.environment(name))

    async def _stop_all(self) -> None:
        """Asks everything to stop, and ends by force what does not in time."""
        children = list(self._children.values())
        for child in reversed(children):
            child.ask_to_stop()
        ends = [asyncio.create_task(child.wait()) for child in children]
        if ends:
            await asyncio.wait(ends, timeout=STOP_S)
        for child in children:
            child.kill_group()
        if ends:
            await asyncio.wait(ends)

    def _announce(self) -> None:
        plan = self._plan
        server = "" if (plan.host, plan.port) == ("127.0.0.1", 50051) else f" --server {plan.router_address}"
        found = script("trunkline")
        command = os.path.relpath(found) if os.sep in found else found
        print(f"\nServing {plan.name} with {plan.workers} workers. Try:\n")
        print(f'    {command} generate "Once upon a time" --stream{server}\n', flush=True)


def say(text: str) -> None:
    print(f"trunkline: {text}", file=sys.stderr, flush=True)


async def start_again(
    name: str, command: list[str], backoff: Backoff, environment: dict[str, str] | None = None
) -> Child:
    """Tries until the system lets it start (it may be out of memory or processes), with growing delays."""
    while True:
        try:
            return await Child.start(name, command, environment)
        except OSError as error:
            delay_s = backoff.after_death(0.0)
            say(f"{name} cannot be started: {error.strerror}; trying again in {delay_s:.1f} s")
            await asyncio.sleep(delay_s)


def address(host: str, port: int) -> str:
    """host:port as gRPC reads it; IPv6 hosts stand in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_port(host: str, port: int) -> None:
    """Raises LaunchError where somebody listens already, or nobody can."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                reason = f"is taken ({error.strerror}): is a cluster running already?"
            else:
                reason = f"cannot be used: {error.strerror}"
            raise LaunchError(f"port {port} on {host} {reason}") from None


async def wait_until_serving(address: str) -> None:
    """Polls grpc.health.v1 until the process says that it is ready."""
    async with grpc.aio.insecure_channel(address, options=(("grpc.max_reconnect_backoff_ms", 500),)) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            try:
                answer = await stub.Check(health_pb2.HealthCheckRequest(service="readiness"), wait_for_ready=True)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            except grpc.aio.AioRpcError:
                pass  # not up yet; a process that died is noticed by its exit, not here
            await asyncio.sleep(POLL_S)


def find_model(name: str) -> Path:
    """A directory, or a hub id that is downloaded (safetensors and JSON only). Raises LaunchError."""
    path = Path(name)
    if path.is_dir():
        return path.resolve()
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise LaunchError(f"there is no model directory {name}")
    from huggingface_hub import snapshot_download

    say(f"{name} is no directory: looking on the Hugging Face hub")
    try:
        return Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.json", "*.jinja"]))
    except Exception as error:  # whatever the library or the network raises: all mean the same here
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise LaunchError(f"there is no directory {name}, and it could not be downloaded: {first}") from None


def serve(plan: ClusterPlan) -> int:
    """Runs the cluster until SIGINT or SIGTERM; returns the exit status."""

    async def run() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, stop.set)
        await Cluster(plan).run(stop)

    try:
        asyncio.run(run())
    except LaunchError as error:
        print(f"trunkline serve: {error}", file=sys.stderr)
        return 1
    return 0
