"""A router with identities before workers, all real processes, for the live page."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

import pytest

from tests.cluster.processes import START_S, Process, Worker, script, wait_until
from tests.router.identity import key_rig
from tests.worker.engine_rig import DEMO_MODEL
from trunkline_bench.servers.ports import free_port
from trunkline_router.access.keys.new_key import new_key

if TYPE_CHECKING:
    from openai import OpenAI

MODEL = "tiny-tales"
TENANTS = ("acme", "zeta")
HUNG_S = 1.5  # silence after which a worker that has work is given up
QUOTAS = {"tokens_per_minute": 400_000, "tokens_in_flight": 60_000}  # of each tenant


@dataclass
class PageCluster:
    """keys: of the tenants' users, and of "operator" and "scraper" """

    url: str
    port: int
    folder: Path
    workers: list[Worker]
    keys: dict[str, str]
    arguments: tuple[str, ...]  # of the workers
    router: Process | None = field(default=None, init=False)

    def start_router(self) -> None:
        self.router = self.another_router(self.port)

    def num_connected(self) -> int:
        """How many workers the router has connected to, however often."""
        lines = () if self.router is None else [line for line in self.router.lines if '"worker connected"' in line]
        return sum(any(f'"{worker.address}"' in line for line in lines) for worker in self.workers)

    def another_router(self, http_port: int, *workers: str, **environment: str) -> Process:
        """A router before the same workers.  workers: addresses of further ones"""
        addresses = [*(worker.address for worker in self.workers), *workers]
        router = Process(
            script("trunkline-router"),
            f"--workers={','.join(addresses)}",
            f"--port={free_port()}",
            f"--http-port={http_port}",
            f"--api-keys={self.folder}/keys.json",
            f"--inter-token-timeout-s={HUNG_S}",
            environment=environment,
        )
        router.wait_for("router listening")
        return router

    def client(self, caller: str) -> "OpenAI":
        from openai import OpenAI  # takes a second, and collecting must not

        return OpenAI(base_url=f"{self.url}v1", api_key=self.keys[caller], max_retries=0)

    def complete(self, caller: str, prompt: str, **options: Any) -> str:
        """Completes a prompt, and returns the request's id."""
        with self.client(caller) as client:
            given = {"max_tokens": 8, "temperature": 0.0, **options}
            raw = client.completions.with_raw_response.create(model=MODEL, prompt=prompt, **given)
            return str(raw.headers["x-request-id"])

    def refused(self, caller: str, prompt: str) -> str:
        """As complete(), for a prompt that must be refused."""
        from openai import BadRequestError

        with self.client(caller) as client, pytest.raises(BadRequestError) as caught:
            client.completions.create(model=MODEL, prompt=prompt)
        return str(caught.value.response.headers["x-request-id"])

    def told(self, path: str) -> Any:
        """What the router tells an operator at a path of the live page."""
        request = Request(self.url + path, headers={"authorization": f"Bearer {self.keys['operator']}"})
        with urlopen(request, timeout=START_S) as answer:
            return json.load(answer)

    def worker_of(self, request_id: str) -> Worker:
        """The worker that has answered a request."""
        address = self.told(f"fleet/requests/{request_id}")["worker_id"]
        return next(worker for worker in self.workers if worker.address == address)

    def complete_many(self, caller: str, prompts: list[str]) -> list[str]:
        """Completes prompts at the same time."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.complete(caller, prompt), prompts))

    def restart(self, worker: Worker) -> Worker:
        """A new process at the address of a worker whose process has ended."""
        worker.stop()
        again = new_worker(*self.arguments, port=worker.port)
        self.workers[self.workers.index(worker)] = again
        return again.wait_ready()


def new_worker(*arguments: str, port: int = 0) -> Worker:
    return Worker(DEMO_MODEL, "--dtype=float32", *arguments, port=port)


@contextmanager
def running_cluster(folder: Path, *arguments: str, workers: int = 2) -> Iterator[PageCluster]:
    """The workers are named by their addresses.  arguments: of the workers"""
    keys = {name: new_key() for name in (*TENANTS, "operator", "scraper")}
    records = [key_rig.record(keys[tenant], tenant=tenant, quotas=QUOTAS) for tenant in TENANTS]
    records.append(key_rig.record(keys["operator"], tenant="ops", roles=["user", "operator"]))
    records.append(key_rig.record(keys["scraper"], tenant="ops", roles=["scraper"]))
    key_rig.write(folder / "keys.json", *records)
    credentials = {name: key.credential for name, key in keys.items()}
    port = free_port()
    cluster = PageCluster(f"http://127.0.0.1:{port}/", port, folder, [], credentials, arguments)

    def stop() -> None:
        for process in (cluster.router, *(worker for worker in cluster.workers)):
            if process is not None:
                process.stop()

    with ExitStack() as stack:
        stack.callback(stop)
        cluster.workers += [new_worker(*arguments) for _ in range(workers)]
        for worker in cluster.workers:
            worker.wait_ready()
        cluster.start_router()
        wait_until(lambda: cluster.num_connected() == workers, "all workers are connected")
        yield cluster
