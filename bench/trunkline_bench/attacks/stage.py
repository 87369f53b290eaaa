"""Where an attack meets its victims: workers, a router that has just started, and an innocent tenant."""

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from trunkline.client import Client
from trunkline.v1.fleet_pb2 import ListWorkersRequest
from trunkline.v1.fleet_pb2_grpc import FleetServiceStub
from trunkline_bench.attacks.attacker import BEGINS, FAST_MODEL, SHARED_NAME
from trunkline_bench.attacks.catalogue import NONE, Case, Section
from trunkline_bench.attacks.false_worker import ASKED, LISTENING
from trunkline_bench.attacks.innocent import TENANT, Innocent, Record
from trunkline_bench.attacks.lies import LIES
from trunkline_bench.attacks.row import Row, bound_beside_others
from trunkline_bench.attacks.server import WORKER_FLAGS, Server
from trunkline_bench.faults.fleet import START_S, FleetError, Process
from trunkline_bench.faults.poison import sitecustomize
from trunkline_bench.ports import free_port
from trunkline_bench.redis_server import RedisServer

REST_S = 3.0  # after the attack, in which memory must fall back
LOOK_S = 0.02
LIE_S = 1.0  # more than other attacks: a worker's description is only the first thing that it says
KEY = "a key for the benchmark, of thirty-two bytes"
QUOTAS = {"*": {"requests_per_minute": 10**6, "tokens_per_minute": 10**8, "tokens_in_flight": 10**7}}
NUM_WORKERS = {Section.LIAR: 2, Section.NAMESAKE: 3}
FRESH_WORKERS = (Section.PORT, Section.KEYED_PORT)  # they are what is attacked
SHOWN_CHARACTERS = 60  # of what a router says of a worker


@dataclass(frozen=True, slots=True)
class Stage:
    """Workers for the attacks of a section."""

    section: Section
    model: Path
    workers: Sequence[Server]
    folder: Path

    async def meet(self, case: Case, seconds: float, alone_ms: float) -> Row:
        """One attack. `alone_ms`: the innocent's p99 without one, for bounds that depend on it. Raises FleetError."""
        async with AsyncExitStack() as stack:
            workers = self.workers
            if self.section in FRESH_WORKERS:
                workers = await stack.enter_async_context(_workers(self.section, self.model, self.folder))
            redis = stack.enter_context(RedisServer()) if self.section is Section.REDIS else None
            neighbour = await self._neighbour(case, workers[0], stack)
            router = Server("router", self.folder, *self._router_flags(workers, neighbour, redis))
            stack.push_async_callback(router.stop)
            await router.start()
            client = await stack.enter_async_context(Client(router.address, tenant=TENANT))
            await client.ready(START_S)
            request_id = SHARED_NAME if self.section is Section.NAMESAKE else ""
            innocent = Innocent(client, case.asks, model=self.model.name, request_id=request_id)
            warm_ms = await innocent.warm_up()
            bounds = case.bounds
            if case.is_beside_others:
                bounds = bounds._replace(p99_ms=bound_beside_others(alone_ms))
            row = Row(case.name, bounds, warm_ms)
            victim = workers[0] if self.section in FRESH_WORKERS else router
            target = redis.url if redis is not None else victim.address
            await self._measure(row, case, innocent, victim, router, neighbour, target, seconds)
        return row

    async def _measure(
        self, row: Row, case: Case, innocent: Innocent, victim: Server, router: Server, neighbour: "Neighbour | None",
        target: str, seconds: float,
    ) -> None:  # fmt: skip
        row.rss_before = row.rss_peak = victim.rss_mib()
        over, began_s = asyncio.Event(), time.monotonic()
        asking: asyncio.Task[Record] | None = None

        async def watch() -> None:
            while True:
                row.rss_peak = max(row.rss_peak, victim.rss_mib())
                await asyncio.sleep(LOOK_S)

        watching = asyncio.create_task(watch())
        try:
            if case.attack == NONE:
                asking = asyncio.create_task(innocent.ask_until(over))
                await asyncio.sleep(seconds)
            elif self.section is Section.LIAR:
                assert neighbour is not None
                await neighbour.process.start()
                await neighbour.process.wait_for(LISTENING)
                asking = asyncio.create_task(innocent.ask_until(over))
                await neighbour.process.wait_for(ASKED)
                await asyncio.sleep(LIE_S + seconds)
                row.outcomes = await _said_of(neighbour, router)
            else:
                attacker = Attacker(case.attack, target, seconds)
                await attacker.begins()
                asking = asyncio.create_task(innocent.ask_until(over))
                outcomes = await attacker.outcomes()
                lost = {"workers lost": sum(worker.ends for worker in self.workers)}
                outcomes |= lost if self.section is Section.NAMESAKE else {}
                row.outcomes = ", ".join(f"{count:,} {name}" for name, count in outcomes.items())
                if case.bounds.statuses:
                    row.strange_statuses = tuple(name for name in outcomes if name not in case.bounds.statuses)
        finally:
            over.set()
            if asking is not None:
                row.record = await asking
            ended_s = time.monotonic()
            for _ in range(round(REST_S / LOOK_S)):
                if victim.rss_mib() - row.rss_before <= row.bounds.kept_mib:
                    break
                await asyncio.sleep(LOOK_S)
            watching.cancel()
        row.rss_after = victim.rss_mib()
        row.lag = victim.lag(began_s, ended_s)

    def _router_flags(
        self, workers: Sequence[Server], neighbour: "Neighbour | None", redis: RedisServer | None
    ) -> list[str]:
        addresses = [worker.address for worker in workers]
        if neighbour is not None:
            addresses.append(f"127.0.0.1:{neighbour.port}")
        flags = [f"--workers={','.join(addresses)}"]
        if self.section is Section.KEYED_PORT:
            flags.append(f"--grant-key={KEY}")
        if redis is not None:
            tenants = self.folder / "tenants.json"
            tenants.write_text(json.dumps(QUOTAS))
            flags += [f"--redis-url={redis.url}", f"--tenants={tenants}"]
        return flags

    async def _neighbour(self, case: Case, real: Server, stack: AsyncExitStack) -> "Neighbour | None":
        """A false worker, where the attack has one: not started yet where it lies."""
        if case.attack in LIES:
            return _false_worker(real, stack, f"--lie={case.attack}")
        if case.attack == UNREAD:
            fast = _false_worker(real, stack, f"--model={FAST_MODEL}")
            await fast.process.start()
            await fast.process.wait_for(LISTENING)
            return fast
        return None


UNREAD = "200 unread streams"


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A false worker."""

    process: Process
    port: int


def _false_worker(real: Server, stack: AsyncExitStack, *flags: str) -> Neighbour:
    port = free_port()
    command = ("-m", "trunkline_bench.attacks.false_worker", f"--port={port}", f"--of={real.address}", *flags)
    process = Process("python", *command)
    stack.push_async_callback(process.stop)
    return Neighbour(process, port)


@asynccontextmanager
async def stage_of(section: Section, model: Path) -> AsyncIterator[Stage]:
    """Starts a section's workers, and stops them."""
    with tempfile.TemporaryDirectory(prefix="attacks-") as name:
        folder = Path(name)
        if section in FRESH_WORKERS:
            yield Stage(section, model, (), folder)
            return
        async with _workers(section, model, folder) as workers:
            yield Stage(section, model, workers, folder)


@asynccontextmanager
async def _workers(section: Section, model: Path, folder: Path) -> AsyncIterator[Sequence[Server]]:
    environment = {"TRUNKLINE_GRANT_KEY": KEY} if section is Section.KEYED_PORT else {}
    if section is Section.NAMESAKE:
        environment["PYTHONPATH"] = str(Path(sitecustomize.__file__).parent)
    flags = (f"--model={model}", *WORKER_FLAGS)
    restarts = section is Section.NAMESAKE
    async with AsyncExitStack() as stack:
        workers = [
            Server("worker", folder, *flags, environment=environment, restarts=restarts)
            for _ in range(NUM_WORKERS.get(section, 1))
        ]
        for worker in workers:
            stack.push_async_callback(worker.stop)
        await asyncio.gather(*(worker.start() for worker in workers))
        yield workers


class Attacker:
    """An attack, which is a process of its own. `address` is a port's, or a Redis's URL."""

    def __init__(self, attack: str, address: str, seconds: float) -> None:
        self._command = ("-m", "trunkline_bench.attacks.attacker", attack, address, f"--seconds={seconds:g}")
        self._process: asyncio.subprocess.Process | None = None

    async def begins(self) -> None:
        """Starts it, and returns when the first blow is about to fall."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, *self._command, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert self._process.stderr is not None
        said = []
        async for line in self._process.stderr:
            said.append(line.decode(errors="replace").strip())
            if said[-1] == BEGINS:
                return
        raise FleetError(f"{self._command[2]} ended before it began: {' '.join(said)}")

    async def outcomes(self) -> dict[str, int]:
        """When it is over: how often each thing happened."""
        assert self._process is not None
        printed, _ = await self._process.communicate()
        outcomes: dict[str, int] = json.loads(printed)
        return outcomes


async def _said_of(neighbour: Neighbour, router: Server) -> str:
    """What a router tells of a worker: its state, and what is wrong with it."""
    async with grpc.aio.insecure_channel(router.address) as channel:
        listed = await FleetServiceStub(channel).ListWorkers(ListWorkersRequest(), timeout=START_S)
    address = f"127.0.0.1:{neighbour.port}"
    return next(_shown(one.state, one.problem) for one in listed.workers if one.address == address)


def _shown(state: int, problem: str) -> str:
    words = ("", "connecting", "ready", "draining", "broken", "hung")[state]
    if len(problem) > SHOWN_CHARACTERS:
        problem = problem[:SHOWN_CHARACTERS] + "…"
    return f"{words}: {problem}" if problem else words
