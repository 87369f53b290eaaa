"""What the chart would run in pods, run here: the rendered commands, settings, probes and hooks, with real processes.

Only what a cluster gives is put in its place: names that its DNS knows, mounted folders, pods' names.
"""

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.cluster.processes import Process, script, wait_until
from tests.deploy.chart import Rendered, pod_of
from tests.worker.engine_rig import DEMO_MODEL
from trunkline import Client
from trunkline.v1.generation_pb2 import Lane
from trunkline_bench.ports import free_port

POOL = "tiny"
GRANT_KEY = {"name": "TRUNKLINE_GRANT_KEY", "value": "a key for tests, of thirty-two bytes"}
SERVING = health_pb2.HealthCheckResponse.SERVING
MOUNTED = "/etc/trunkline"
TOKENS = 900  # several seconds of them: the hook is a Python process, and its start takes a while
# Places in a container's scratch volume; here processes use those of the machine.
SCRATCH = {"HOME", "TRITON_CACHE_DIR"}


class Pod:
    """A workload's main container, run as a local process."""

    def __init__(self, rendered: Rendered, workload: Any, folder: Path, substitutions: dict[str, str]) -> None:
        self.name = workload["metadata"]["name"] + "-0"
        (self.container,) = pod_of(workload)["containers"]
        self._substitutions = substitutions | {MOUNTED: str(folder)}
        for volume in pod_of(workload)["volumes"]:
            if "configMap" in volume:
                for name, text in rendered.one("ConfigMap", volume["configMap"]["name"])["data"].items():
                    (folder / name).write_text(self.here(text))
        self.environment = {
            entry["name"]: self.here(entry["value"]) if "value" in entry else self._field(entry["valueFrom"])
            for entry in self.container.get("env", ())
            if entry["name"] not in SCRATCH
        }

    def here(self, text: str) -> str:
        """With what is here in place of what is in a cluster."""
        for theirs, ours in self._substitutions.items():
            text = text.replace(theirs, ours)
        return text

    def _field(self, source: Any) -> str:
        assert source == {"fieldRef": {"fieldPath": "metadata.name"}}
        return self.name

    def command(self, words: list[str]) -> list[str]:
        return [script(words[0]), *map(self.here, words[1:])]

    def start(self) -> Process:
        words = self.command(self.container["command"] + self.container["args"])
        return Process(*words, environment=self.environment)

    def probe(self, kind: str) -> int | None:
        """What the kubelet would hear; None where nobody answers."""
        asked = self.container[kind]["grpc"]
        with grpc.insecure_channel(f"127.0.0.1:{asked['port']}") as channel:
            try:
                request = health_pb2.HealthCheckRequest(service=asked["service"])
                status: int = health_pb2_grpc.HealthStub(channel).Check(request, timeout=5).status
            except grpc.RpcError:
                return None
            return status


class Cluster:
    """Redis, a worker and a router, each with its pod."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.router_port, worker_port, redis_port = free_port(), free_port(), free_port()
        self.rendered = Rendered(
            {
                "router": {
                    "port": self.router_port,
                    "config": {"processes": 2},
                    "env": [GRANT_KEY],
                    "tenants": {"acme": {"weight": 2, "lane": "batch"}},
                },
                "workers": {
                    "qwen3-0-6b": None,
                    POOL: {
                        "model": {"hostPath": {"path": "/srv/models/tiny"}},
                        "port": worker_port,
                        "gpus": 0,
                        "env": [GRANT_KEY],
                        "config": {"device": "cpu", "threads": 1, "kv_blocks": 256, "drain_timeout_s": 30},
                    },
                },
                "redis": {"port": redis_port},
            }
        )
        names = {"router": "Deployment", f"worker-{POOL}": "StatefulSet", "redis": "Deployment"}
        self.in_cluster = {f"demo-trunkline-{name}:": "127.0.0.1:" for name in names}
        self.pods: dict[str, Pod] = {}
        self.processes: dict[str, Process] = {}
        for name, kind in names.items():
            workload = self.rendered.one(kind, f"demo-trunkline-{name}")
            (folder / name).mkdir()
            self.pods[name] = Pod(
                self.rendered, workload, folder / name, self.in_cluster | {'"/models"': json.dumps(str(DEMO_MODEL))}
            )
        for name in ("redis", f"worker-{POOL}", "router"):
            self.processes[name] = self.pods[name].start()
            stack.callback(self.processes[name].stop)

    def is_ready(self, name: str) -> bool:
        return self.probe(name, "readinessProbe") == SERVING

    def probe(self, name: str, kind: str) -> int | None:
        return self.pods[name].probe(kind)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ExitStack() as stack:
        cluster = Cluster(tmp_path_factory.mktemp("chart"), stack)
        for name in ("router", f"worker-{POOL}"):
            wait_until(partial(cluster.is_ready, name), f"{name} is ready")
        yield cluster


async def run(words: list[str], pod: Pod) -> tuple[int, str, str]:
    """(exit status, standard output, standard error) of a command in a pod."""
    environment = os.environ | pod.environment
    process = await asyncio.create_subprocess_exec(
        *words, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_probes_are_answered(running: Cluster) -> None:
    for name, probe in (
        ("router", "livenessProbe"),
        (f"worker-{POOL}", "livenessProbe"),
        (f"worker-{POOL}", "startupProbe"),
    ):
        assert running.probe(name, probe) == SERVING
    redis = running.pods["redis"]
    asked = redis.command(redis.container["readinessProbe"]["exec"]["command"])
    assert await run(asked, redis) == (0, "PONG\n", "")


async def test_a_request_is_answered_by_the_pod_and_on_the_terms_of_its_tenant(running: Cluster) -> None:
    async with Client(f"127.0.0.1:{running.router_port}", model=POOL, tenant="acme", connections=2) as client:
        await client.ready()
        done = await client.complete("Once upon a time", max_tokens=4, lane="interactive")
    assert done.usage.completion_tokens == 4
    assert done.prompt.worker_id == running.pods[f"worker-{POOL}"].name
    assert done.prompt.lane == Lane.LANE_BATCH, "its terms allow no better lane than batch"


async def test_the_charts_own_test_passes(running: Cluster) -> None:
    (pod,) = running.rendered.of("Pod")
    (container,) = pod["spec"]["containers"]
    words = running.pods["router"].command(container["command"] + container["args"])
    status, out, err = await run(words, running.pods["router"])
    assert (status, err) == (0, "")
    assert out.startswith("Hello")


async def test_pods_end_as_the_hooks_say_and_no_stream_notices(running: Cluster) -> None:
    name = f"worker-{POOL}"
    worker, process = running.pods[name], running.processes[name]
    async with Client(f"127.0.0.1:{running.router_port}", model=POOL) as client:
        pieces = client.generate("Once upon a time", max_tokens=TOKENS, ignore_eos=True)
        tokens = len((await anext(pieces)).token_ids)
        hook = worker.command(worker.container["lifecycle"]["preStop"]["exec"]["command"])
        draining = asyncio.create_task(run(hook, worker))
        async for piece in pieces:
            tokens += len(piece.token_ids)
        assert tokens == TOKENS
        assert await draining == (0, "finished 1, cut off 0\n", "")
    assert running.probe(name, "readinessProbe") != SERVING
    assert running.probe(name, "livenessProbe") == SERVING, "or the kubelet would kill what drains"
    assert await run(hook, worker) == (0, "finished 0, cut off 0\n", "")
    for ending in (process, running.processes["router"]):
        ending.popen.terminate()
        assert ending.wait() == 0
    status, _, said = await run(hook, worker)
    assert (status, said.count("\n")) == (1, 1)
    assert said.startswith("trunkline drain: 127.0.0.1:")
