"""Clusters under attack: workers that serve a section of the catalogue, and a new router for each attack."""

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from trunkline.client.client import Client
from trunkline_bench.attacks.attack_result import AttackResult, bound_beside_others
from trunkline_bench.attacks.calling_model import write_calling_model
from trunkline_bench.attacks.catalogue import Case, Section
from trunkline_bench.attacks.host_faults import BLOCKING_KEYS, add_key
from trunkline_bench.attacks.innocent import TENANT, Innocent
from trunkline_bench.attacks.measurement import Measurement
from trunkline_bench.attacks.neighbour import neighbour_of
from trunkline_bench.attacks.server import WORKER_FLAGS, Server
from trunkline_bench.attacks.vectors.attacker import SHARED_NAME
from trunkline_bench.attacks.vectors.guided_floods import CALLING_MODEL
from trunkline_bench.attacks.window import Window
from trunkline_bench.faults.fleet import START_S
from trunkline_bench.faults.poison import sitecustomize
from trunkline_bench.servers.ports import free_port
from trunkline_bench.servers.redis_server import RedisServer

KEY = "a key for the benchmark, of thirty-two bytes"
QUOTAS = {"*": {"requests_per_minute": 10**6, "tokens_per_minute": 10**8, "tokens_in_flight": 10**7}}
NUM_WORKERS = {Section.LIAR: 2, Section.NAMESAKE: 3}
OVER_HTTP = (Section.HTTP, Section.GUIDED)  # the attacker sends
FRESH_WORKERS = (Section.PORT, Section.KEYED_PORT)  # the workers are the victims


@dataclass(frozen=True, slots=True)
class AttackedCluster:
    """Workers for the attacks of a section; empty if each attack gets new ones."""

    section: Section
    model: Path
    workers: Sequence[Server]
    folder: Path

    async def run(self, case: Case, window: Window, alone_ms: float) -> AttackResult:
        """Runs one attack. `alone_ms`: the innocent's p99 without one, for bounds that depend on it.

        Raises FleetError and TrunklineError."""
        async with AsyncExitStack() as stack:
            measurement, warm_ms = await self._set_up(case, stack)
            bounds = case.bounds
            if case.is_beside_others:
                bounds = bounds._replace(p99_ms=bound_beside_others(alone_ms))
            result = AttackResult(case.name, bounds, warm_ms)
            await measurement.measure(result, window)
        return result

    async def _set_up(self, case: Case, stack: AsyncExitStack) -> tuple[Measurement, float]:
        """Starts the router and what the attack needs. Also returns the slowest of a few warm-up requests, in ms."""
        workers = self.workers
        if self.section in FRESH_WORKERS:
            workers = await stack.enter_async_context(_workers(self.section, self.model, self.folder))
        neighbour = await neighbour_of(workers[0], case, stack)
        addresses = [worker.address for worker in workers] + ([neighbour.address] if neighbour else [])
        http_port = free_port() if self.section in OVER_HTTP else -1
        flags = [f"--workers={','.join(addresses)}", f"--http-port={http_port}"]
        if self.section is Section.KEYED_PORT:
            flags.append(f"--grant-key={KEY}")
        redis, keys = None, self.folder / "keys.json"
        credential: str | None = None
        if case.attack == BLOCKING_KEYS:
            credential = add_key(keys, TENANT)
            flags.append(f"--api-keys={keys}")
        if self.section is Section.REDIS:
            redis = stack.enter_context(RedisServer())
            tenants = self.folder / "tenants.json"
            tenants.write_text(json.dumps(QUOTAS))  # so that each request reserves quotas in Redis
            flags += [f"--redis-url={redis.url}", f"--tenants={tenants}"]
        router = Server("router", self.folder, *flags)
        stack.push_async_callback(router.stop)
        await router.start()
        client = await stack.enter_async_context(
            Client(router.address, tenant=TENANT, api_key=credential or None, retries=0)
        )
        await client.ready(START_S)
        request_id = SHARED_NAME if self.section is Section.NAMESAKE else ""
        innocent = Innocent(client, case.asks, model=self.model.name, request_id=request_id)
        warm_ms = await innocent.warm_up()
        victim = workers[0] if self.section in FRESH_WORKERS else router
        target = victim.address if redis is None else redis.url
        if self.section in OVER_HTTP:
            target = f"127.0.0.1:{http_port}"
        return Measurement(case, innocent, victim, target, router, workers, neighbour, keys), warm_ms


@asynccontextmanager
async def attacked_cluster(section: Section, model: Path) -> AsyncIterator[AttackedCluster]:
    """Starts a section's workers; stops them at the end. Raises FleetError."""
    with tempfile.TemporaryDirectory(prefix="attacks-") as name:
        folder = Path(name)
        if section is Section.GUIDED:
            model = folder / CALLING_MODEL
            write_calling_model(model)
        if section in FRESH_WORKERS:
            yield AttackedCluster(section, model, (), folder)
            return
        async with _workers(section, model, folder) as workers:
            yield AttackedCluster(section, model, workers, folder)


@asynccontextmanager
async def _workers(section: Section, model: Path, folder: Path) -> AsyncIterator[Sequence[Server]]:
    environment = {"TRUNKLINE_GRANT_KEY": KEY} if section is Section.KEYED_PORT else {}
    if section is Section.NAMESAKE:
        environment["PYTHONPATH"] = str(Path(sitecustomize.__file__).parent)
    flags = (f"--model={model}", *WORKER_FLAGS)
    async with AsyncExitStack() as stack:
        workers = [
            Server("worker", folder, *flags, environment=environment, restarts=section is Section.NAMESAKE)
            for _ in range(NUM_WORKERS.get(section, 1))
        ]
        for worker in workers:
            stack.push_async_callback(worker.stop)
        await asyncio.gather(*(worker.start() for worker in workers))
        yield workers
