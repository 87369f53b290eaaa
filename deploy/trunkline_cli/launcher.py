"""`trunkline serve`: starts one router and several workers on this machine, watches them and stops them together."""

import asyncio
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from trunkline.client.client import Client
from trunkline.errors import NotAllowed, TrunklineError
from trunkline_cli.backoff import Backoff
from trunkline_cli.child import Child, describe_status, print_log_line
from trunkline_cli.console import Console, LogConsole, print_without_waiting, say
from trunkline_cli.liveness import CHART_PROBE, Probe, until_hung
from trunkline_cli.plan import ClusterPlan, LaunchError, check_port

POLL_S = 0.1  # between readiness checks of a process
STOP_S = 4.0  # time for the processes to stop; those left are then killed, so that stopping takes less than 5 s


@dataclass(frozen=True, slots=True)
class End:
    """How a process ended."""

    status: int
    cause: str  # from the last lines that it printed
    hung: str = ""  # why it counted as hung and was stopped; empty if it ended by itself

    def __str__(self) -> str:
        if self.hung:
            return f"hung ({self.hung}) and was stopped ({describe_status(self.status)})"
        if self.status == 0:
            return "stopped (exit status 0)"
        return f"died ({describe_status(self.status)}): {self.cause}"


class Cluster:
    """The processes of a plan."""

    def __init__(self, plan: ClusterPlan, probe: Probe | None = CHART_PROBE, console: Console | None = None) -> None:
        self._plan = plan
        self._probe = probe
        self._console = console or LogConsole()
        self._children: dict[str, Child] = {}
        # Set when a process has answered a liveness probe for the first time since the launch.
        self._answered = {name: asyncio.Event() for name in plan.addresses()}
        self._rng = Random()
        self._needs_credentials = False  # the router serves no caller without them

    async def run(self, stop: asyncio.Event) -> None:
        """Starts all processes, prints how to use the cluster, and keeps it running until `stop`.

        Raises LaunchError if a port is taken, or if a process cannot be started or ends before all are ready.
        """
        plan = self._plan
        for port in plan.ports():
            check_port(plan.host, port)
        for port in plan.metrics_ports():
            check_port(plan.host, port, "--metrics-port")
        self._console.loading(plan)
        commands = plan.commands()
        stopped = asyncio.create_task(stop.wait())
        starting = asyncio.create_task(self._wait_until_ready())
        lives: dict[str, asyncio.Task[End]] = {}
        supervisors: list[asyncio.Task[None]] = []
        try:
            for name, command in commands.items():
                try:
                    self._children[name] = await Child.start(
                        name, command, plan.environment(name), self._console.log_line
                    )
                except OSError as error:
                    raise LaunchError(f"{name} cannot be started: {command[0]}: {error.strerror}") from None
                lives[name] = asyncio.create_task(self._live(name))
            await asyncio.wait({starting, stopped, *lives.values()}, return_when=asyncio.FIRST_COMPLETED)
            if stopped.done():
                self._console.stopping()
                return
            for name, life in lives.items():
                if life.done():
                    reason = life.result().hung or life.result().cause
                    raise LaunchError(f"{name} did not start: {reason}{self._console.where_to_look(name)}")
            starting.result()
            self._console.all_ready(plan, needs_credentials=self._needs_credentials)
            supervisors = [asyncio.create_task(self._supervise(name, life)) for name, life in lives.items()]
            done, _ = await asyncio.wait({stopped, *supervisors}, return_when=asyncio.FIRST_COMPLETED)
            if stopped.done():
                self._console.stopping()
            for ended in done:
                ended.result()  # raises the error of a supervisor: only a bug ends one
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
                self._console.worker_ready(name, address)
        await wait_until_serving(plan.router_address)
        async with Client(plan.router_address, retries=0) as client:
            while True:
                try:
                    models = await client.list_models()
                except NotAllowed:
                    # The router was given API keys or tokens, and the launcher has none. It has a worker, and it
                    # connects to the others soon: they are ready.
                    self._needs_credentials = True
                    break
                except TrunklineError:
                    models = []
                if sum(model.ready_workers for model in models) == plan.workers:
                    break
                await asyncio.sleep(POLL_S)
        if self._probe is not None:
            # Failed probes mean a hung process only after it has answered one. Before, it may still be starting.
            for answered in self._answered.values():
                await answered.wait()

    async def _live(self, name: str) -> End:
        """Waits until a process ends or hangs, and stops it if it hangs; returns how it ended."""
        child, cause = self._children[name], self._console.cause
        if self._probe is None:
            return End(await child.wait(), cause(child.last_lines))
        ended = asyncio.create_task(child.wait())
        address, answered = self._plan.addresses()[name], self._answered[name]
        hung = asyncio.create_task(until_hung(address, self._probe, answered))
        try:
            await asyncio.wait({ended, hung}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                return End(ended.result(), cause(child.last_lines))
            return End(await child.end(STOP_S), cause(child.last_lines), hung.result())
        finally:
            ended.cancel()
            hung.cancel()

    async def _supervise(self, name: str, life: asyncio.Task[End]) -> None:
        """Starts a process again each time it ends, after a growing delay."""
        backoff = Backoff(self._rng)
        end = await life
        while True:
            child = self._children[name]
            child.kill_group()
            delay_s = backoff.after_death(asyncio.get_running_loop().time() - child.started_s)
            say(f"{name} {end}; starting it again in {delay_s:.1f} s{self._console.where_to_look(name)}")
            await asyncio.sleep(delay_s)
            command, environment = self._plan.commands()[name], self._plan.environment(name)
            self._children[name] = await start_again(name, command, backoff, environment, self._console.log_line)
            end = await self._live_again(name)

    async def _live_again(self, name: str) -> End:
        """As _live(), for a process that was started again; says when it is ready."""
        address = self._plan.addresses()[name]
        life = asyncio.create_task(self._live(name))
        ready = asyncio.create_task(wait_until_serving(address))
        try:
            await asyncio.wait({life, ready}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                ready.result()
                say(f"{name} is ready again on {address}")
            return await life
        finally:
            ready.cancel()
            life.cancel()

    async def _stop_all(self) -> None:
        """Asks all processes to stop, and kills those that still run after STOP_S."""
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


async def start_again(
    name: str,
    command: list[str],
    backoff: Backoff,
    environment: dict[str, str] | None = None,
    log_line: Callable[[str, str], None] = print_log_line,
) -> Child:
    """Tries with growing delays until the process starts: the system may be out of memory or processes."""
    while True:
        try:
            return await Child.start(name, command, environment, log_line)
        except OSError as error:
            delay_s = backoff.after_death(0.0)
            say(f"{name} cannot be started: {error.strerror}; trying again in {delay_s:.1f} s")
            await asyncio.sleep(delay_s)


async def wait_until_serving(address: str) -> None:
    """Polls grpc.health.v1 until the process reports that it is ready."""
    async with grpc.aio.insecure_channel(address, options=(("grpc.max_reconnect_backoff_ms", 500),)) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            try:
                answer = await stub.Check(health_pb2.HealthCheckRequest(service="readiness"), wait_for_ready=True)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                    return  # the router is up, and was told to answer callers without credentials something else alone
                # Otherwise it is not up yet. A process that died is noticed by its exit.
            await asyncio.sleep(POLL_S)


def find_model(name: str) -> Path:
    """The model's directory or GGUF file; a hub id is downloaded first (safetensors, JSON and chat templates).

    Raises LaunchError if there is no such directory or model, or if it cannot be read or downloaded.
    """
    path = Path(name)
    shown = name if name and name.isprintable() else repr(name)
    try:
        is_file = path.is_file()
        if name and (path.is_dir() or (is_file and path.suffix.lower() == ".gguf")):
            # A file of the hub's cache is a link to one without a suffix.
            return path.absolute() if is_file else path.resolve()
    except OSError as error:
        raise LaunchError(f"the model directory {shown} cannot be read: {error.strerror}") from None
    if is_file:
        raise LaunchError(
            f"{shown} is a file: a model is a GGUF file, or a directory with config.json, tokenizer.json and "
            "safetensors"
        )
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise LaunchError(f"there is no model directory {shown}")
    from huggingface_hub import snapshot_download

    say(f"{shown} is not a directory: looking on the Hugging Face hub")
    try:
        return Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.json", "*.jinja"]))
    except Exception as error:  # every error of the library or the network means the same here
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise LaunchError(f"there is no directory {shown}, and it could not be downloaded: {first}") from None


def serve(plan: ClusterPlan, *, probe: Probe | None, console: Console) -> int:
    """Runs the cluster until SIGINT, SIGTERM or SIGHUP; returns the exit status.  probe: None: no process is probed"""

    async def run() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, stop.set)
        await Cluster(plan, probe, console).run(stop)

    print_without_waiting()  # a launcher that waits neither restarts its processes nor stops them
    try:
        asyncio.run(run())
    except LaunchError as error:
        print(f"trunkline serve: {error}", file=sys.stderr)
        return 1
    return 0
