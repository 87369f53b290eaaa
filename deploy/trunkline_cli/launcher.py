"""`trunkline serve`: one router and several workers on this machine, started, watched, and stopped together."""

import asyncio
import os
import signal
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
from trunkline_cli.liveness import CHART_PROBE, Probe, until_hung
from trunkline_cli.plan import ClusterPlan, LaunchError, check_port

POLL_S = 0.1  # between looks at whether a process is ready
STOP_S = 4.0  # processes have this long to stop; what is left is killed, so that all is over within 5 s


@dataclass(frozen=True, slots=True)
class End:
    """How a process ended."""

    status: int
    last_line: str  # that it printed
    hung: str = ""  # why it counted as hung and was stopped; empty: it ended by itself

    def __str__(self) -> str:
        if self.hung:
            return f"hung ({self.hung}) and was stopped ({describe_status(self.status)})"
        return f"died ({describe_status(self.status)}): {self.last_line}"


class Cluster:
    """The processes of a plan."""

    def __init__(self, plan: ClusterPlan, probe: Probe | None = CHART_PROBE) -> None:
        self._plan = plan
        self._probe = probe
        self._children: dict[str, Child] = {}
        self._answered = {name: asyncio.Event() for name in plan.addresses()}  # a liveness probe, since the launch
        self._rng = Random()

    async def run(self, stop: asyncio.Event) -> None:
        """Starts everything, says how to use it, and keeps it running until `stop`. Raises LaunchError."""
        plan = self._plan
        for port in plan.ports():
            check_port(plan.host, port)
        commands = plan.commands()
        stopped = asyncio.create_task(stop.wait())
        starting = asyncio.create_task(self._wait_until_ready())
        lives: dict[str, asyncio.Task[End]] = {}
        supervisors: list[asyncio.Task[None]] = []
        try:
            for name, command in commands.items():
                try:
                    self._children[name] = await Child.start(name, command, plan.environment(name))
                except OSError as error:
                    raise LaunchError(f"{name} cannot be started: {command[0]}: {error.strerror}") from None
                lives[name] = asyncio.create_task(self._live(name))
            await asyncio.wait({starting, stopped, *lives.values()}, return_when=asyncio.FIRST_COMPLETED)
            if stopped.done():
                return
            for name, life in lives.items():
                if life.done():
                    raise LaunchError(f"{name} did not start: {life.result().hung or life.result().last_line}")
            starting.result()
            self._announce()
            supervisors = [asyncio.create_task(self._supervise(name, life)) for name, life in lives.items()]
            done, _ = await asyncio.wait({stopped, *supervisors}, return_when=asyncio.FIRST_COMPLETED)
            for ended in done:
                ended.result()  # only a bug ends a supervisor: then it is raised here
        finally:
            tasks = [stopped, starting, *supervisors, *lives.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._stop_all()

    async def _wait_until_ready(self) -> None:
        plan = self._plan
        for name, address in plan.addresses().items():
            if name != "router":
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
                    break
                await asyncio.sleep(POLL_S)
        if self._probe is not None:
            # From then on a process that hangs is known to do so. Before, it may be one that is still starting.
            for answered in self._answered.values():
                await answered.wait()

    async def _live(self, name: str) -> End:
        """Waits until a process ends, or hangs; what hangs is stopped."""
        child = self._children[name]
        if self._probe is None:
            return End(await child.wait(), child.last_line)
        ended = asyncio.create_task(child.wait())
        address, answered = self._plan.addresses()[name], self._answered[name]
        hung = asyncio.create_task(until_hung(address, self._probe, answered))
        try:
            await asyncio.wait({ended, hung}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                return End(ended.result(), child.last_line)
            return End(await child.end(STOP_S), child.last_line, hung.result())
        finally:
            ended.cancel()
            hung.cancel()

    async def _supervise(self, name: str, life: asyncio.Task[End]) -> None:
        """Starts a process again whenever its life is over, after a growing delay."""
        backoff = Backoff(self._rng)
        end = await life
        while True:
            child = self._children[name]
            child.kill_group()
            delay_s = backoff.after_death(asyncio.get_running_loop().time() - child.started_s)
            say(f"{name} {end}; starting it again in {delay_s:.1f} s")
            await asyncio.sleep(delay_s)
            command, environment = self._plan.commands()[name], self._plan.environment(name)
            self._children[name] = await start_again(name, command, backoff, environment)
            end = await self._live(name)

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
    shown = name if name and name.isprintable() else repr(name)
    try:
        if name and path.is_dir():
            return path.resolve()
    except OSError as error:
        raise LaunchError(f"the model directory {shown} cannot be read: {error.strerror}") from None
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise LaunchError(f"there is no model directory {shown}")
    from huggingface_hub import snapshot_download

    say(f"{shown} is no directory: looking on the Hugging Face hub")
    try:
        return Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.json", "*.jinja"]))
    except Exception as error:  # whatever the library or the network raises: all mean the same here
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise LaunchError(f"there is no directory {shown}, and it could not be downloaded: {first}") from None


def serve(plan: ClusterPlan, *, probe: Probe | None) -> int:
    """Runs the cluster until SIGINT or SIGTERM; returns the exit status.  probe: None: what hangs is left as it is"""

    async def run() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, stop.set)
        await Cluster(plan, probe).run(stop)

    try:
        asyncio.run(run())
    except LaunchError as error:
        print(f"trunkline serve: {error}", file=sys.stderr)
        return 1
    return 0
