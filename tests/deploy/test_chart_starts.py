"""Runs the chart's pods as local processes, with the rendered commands, settings, probes and hooks.

Only the cluster's own parts are replaced: its DNS, mounted folders, pod names and Secrets.
"""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
from base64 import b64decode
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis import Redis
from redis.exceptions import AuthenticationError

from tests.cluster.processes import START_S, Process, script, wait_until
from tests.deploy.chart import Rendered, pod_of
from tests.worker.engine_rig import DEMO_MODEL
from trunkline import Client
from trunkline.v1.generation_pb2 import Lane
from trunkline_bench.servers.ports import free_port
from trunkline_bench.servers.redis_server import redis_executable

POOL = "tiny"
GRANT_KEY = {"name": "TRUNKLINE_GRANT_KEY", "value": "a key for tests, of thirty-two bytes"}
FLEET_SECRET = "a secret for tests, of thirty-two bytes"
SERVING = health_pb2.HealthCheckResponse.SERVING
TOKENS = 200
FAR_FUTURE_MS = 1 << 52
# As in Redis's image, its programs are on PATH.
PATH = f"{Path(redis_executable()).parent}{os.pathsep}{os.environ['PATH']}"
# Paths in a container's scratch volume; local processes use those of the machine.
SCRATCH = {"HOME", "TRITON_CACHE_DIR"}


class Pod:
    """A workload's main container, run as a local process."""

    def __init__(
        self, rendered: Rendered, workload: Any, folder: Path, substitutions: dict[str, str], secrets: Path
    ) -> None:
        """secrets: a folder for each Secret that the user has made, with its entries"""
        self.name: str = workload["metadata"]["name"] + "-0"
        (self.container,) = pod_of(workload)["containers"]
        mounted = {mount["name"]: mount["mountPath"] for mount in self.container["volumeMounts"]}
        self._substitutions = dict(substitutions)
        texts: dict[str, str] = {}
        for volume in pod_of(workload)["volumes"]:
            if "configMap" in volume:
                self._substitutions[mounted[volume["name"]]] = str(folder)
                texts |= rendered.one("ConfigMap", volume["configMap"]["name"])["data"]
            elif "secret" in volume:
                assert all(item["key"] == item["path"] for item in volume["secret"]["items"])
                self._substitutions[mounted[volume["name"]]] = str(secrets / volume["secret"]["secretName"])
        for name, text in texts.items():
            (folder / name).write_text(self.here(text))
        self.environment: dict[str, str] = {}
        for entry in self.container.get("env", ()):
            if entry["name"] in SCRATCH:
                continue
            if "value" in entry:
                # $(NAME) is the value of an earlier entry.
                value = re.sub(r"\$\((\w+)\)", lambda found: self.environment[found[1]], self.here(entry["value"]))
            else:
                value = self._field(rendered, entry["valueFrom"])
            self.environment[entry["name"]] = value

    def here(self, text: str) -> str:
        """Replaces a cluster's addresses and paths by local ones."""
        for theirs, ours in sorted(self._substitutions.items(), key=lambda pair: -len(pair[0])):
            text = text.replace(theirs, ours)
        return text

    def _field(self, rendered: Rendered, source: Any) -> str:
        if "secretKeyRef" in source:
            named = source["secretKeyRef"]
            return b64decode(rendered.one("Secret", named["name"])["data"][named["key"]]).decode()
        assert source == {"fieldRef": {"fieldPath": "metadata.name"}}
        return self.name

    def command(self, words: list[str]) -> list[str]:
        """The local command. Redis's image has a shell; our images have the console scripts."""
        return [words[0] if words[0] == "sh" else script(words[0]), *map(self.here, words[1:])]

    def start(self) -> Process:
        words = self.command(self.container["command"] + self.container["args"])
        return Process(*words, environment=self.environment | {"PATH": PATH})

    def probe(self, kind: str) -> int | None:
        """The answer to a kubelet's probe; None if there is no answer."""
        asked = self.container[kind]["grpc"]
        with grpc.insecure_channel(f"127.0.0.1:{asked['port']}") as channel:
            try:
                request = health_pb2.HealthCheckRequest(service=asked["service"])
                status: int = health_pb2_grpc.HealthStub(channel).Check(request, timeout=60).status
            except grpc.RpcError:
                return None
            return status


class Cluster:
    """Redis, a worker and a router, each with its pod."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.router_port, self.http_port, worker_port, redis_port = (free_port() for _ in range(4))
        self.key_file = folder / "keys" / "keys.json"
        self.key_file.parent.mkdir()
        self.key = self.new_key()
        (folder / "fleet").mkdir()
        (folder / "fleet" / "secret").write_text(FLEET_SECRET)
        self.rendered = Rendered(
            {
                "identity": {"apiKeys": {"name": "keys"}, "fleetSecret": {"name": "fleet"}},
                "router": {
                    "port": self.router_port,
                    "http": {"port": self.http_port},
                    "healthPort": free_port(),
                    # The drain test stops the engine for as long as a Python process takes to start.
                    "config": {"processes": 2, "inter_token_timeout_s": 60},
                    "env": [GRANT_KEY],
                    "tenants": {"acme": {"weight": 2, "lane": "batch"}},
                },
                "workers": {
                    "qwen3-0-6b": None,
                    POOL: {
                        "model": {"hostPath": {"path": "/srv/models/tiny"}},
                        "port": worker_port,
                        "healthPort": free_port(),
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
                self.rendered,
                workload,
                folder / name,
                self.in_cluster | {'"/models"': json.dumps(str(DEMO_MODEL))},
                secrets=folder,
            )
        for name in ("redis", f"worker-{POOL}", "router"):
            self.processes[name] = self.pods[name].start()
            stack.callback(self.processes[name].stop)

    def new_key(self) -> str:
        """A key of the tenant acme in the Secret."""
        words = [script("trunkline"), "keys", "create", "--tenant=acme", f"--file={self.key_file}"]
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()

    def is_ready(self, name: str) -> bool:
        return bool(self.probe(name, "readinessProbe") == SERVING)

    def probe(self, name: str, kind: str) -> int | None:
        return self.pods[name].probe(kind)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRUNKLINE_HTTP_PORT")  # the suite's own would win over the rendered file
        cluster = Cluster(tmp_path_factory.mktemp("chart"), stack)
        for name in ("router", f"worker-{POOL}"):
            wait_until(partial(cluster.is_ready, name), f"{name} is ready")
        yield cluster


async def run(words: list[str], environment: dict[str, str]) -> tuple[int, str, str]:
    """(exit status, standard output, standard error) of a command in a pod with this environment."""
    process = await asyncio.create_subprocess_exec(
        *words,
        env={**os.environ, **environment, "PATH": PATH},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def what_ps_shows(process: Process) -> str:
    return Path(f"/proc/{process.popen.pid}/cmdline").read_text()


def only_child(process: Process) -> int:
    return int(Path(f"/proc/{process.popen.pid}/task/{process.popen.pid}/children").read_text())


async def test_probes_are_answered(running: Cluster) -> None:
    for name, probe in (
        ("router", "livenessProbe"),
        (f"worker-{POOL}", "livenessProbe"),
        (f"worker-{POOL}", "startupProbe"),
    ):
        assert running.probe(name, probe) == SERVING
    redis = running.pods["redis"]
    asked = redis.command(redis.container["readinessProbe"]["exec"]["command"])
    assert await run(asked, redis.environment) == (0, "PONG\n", "")


async def test_who_does_not_know_the_password_is_told_nothing_by_redis(running: Cluster) -> None:
    redis = running.pods["redis"]
    for password in (None, "0" * 32):
        client = Redis(port=redis.container["ports"][0]["containerPort"], password=password)
        with client, pytest.raises(AuthenticationError):
            client.keys()
    asked = redis.command(redis.container["readinessProbe"]["exec"]["command"])
    assert (await run(asked, {}))[0] == 1, "a Redis that does not take the password is not ready"
    secret = redis.environment["REDISCLI_AUTH"]
    for process in running.processes.values():
        assert secret not in what_ps_shows(process)


@pytest.mark.parametrize("password", ["", "no/slash", "no space", "no line end\n"])
def test_redis_does_not_start_with_a_password_that_would_not_stand_in_a_url(running: Cluster, password: str) -> None:
    redis = running.pods["redis"]
    words = redis.command(redis.container["command"] + redis.container["args"])
    process = Process(*words, environment={"PATH": PATH, "REDISCLI_AUTH": password})
    assert process.wait() == 1
    assert process.lines == ["the password in the Secret must be letters and digits only"]
    process.stop()


def test_routers_share_through_redis_and_who_writes_there_does_not_send_them_anywhere(running: Cluster) -> None:
    url = running.pods["router"].environment["TRUNKLINE_REDIS_URL"]
    with Redis.from_url(url, decode_responses=True) as client, socket.create_server(("127.0.0.1", 0)) as stranger:

        def key(name: str) -> str | None:
            return next(client.scan_iter(match=f"{{llm/demo}}:*:{name}"), None)

        def reports() -> list[int]:
            """The number of reports that each router process has written."""
            return [int(entry.rpartition(":")[2]) for entry in client.hvals(key("routers") or "")]

        wait_until(lambda: key("leases") is not None, "the worker is leased")
        wait_until(lambda: len(reports()) == 2, "both processes report")
        leases = key("leases") or ""
        (lease,) = client.hvals(leases)
        forged = f"{FAR_FUTURE_MS}|{lease.partition('|')[2]}"
        client.hset(leases, f"127.0.0.1:{stranger.getsockname()[1]}", forged)
        client.hincrby(leases.removesuffix("leases") + "versions", "leases", 1)
        before = max(reports())
        wait_until(lambda: min(reports()) >= before + 3, "each has been told of it, and had a second since")
        stranger.setblocking(False)
        with pytest.raises(BlockingIOError):
            stranger.accept()
        client.hdel(leases, f"127.0.0.1:{stranger.getsockname()[1]}")


async def test_a_request_is_answered_by_the_pod_and_on_the_terms_of_its_tenant(running: Cluster) -> None:
    async with Client(f"127.0.0.1:{running.router_port}", model=POOL, api_key=running.key, connections=2) as client:
        await client.ready()
        done = await client.complete("Once upon a time", max_tokens=4, lane="interactive")
    assert done.usage.completion_tokens == 4
    assert done.prompt.worker_id == running.pods[f"worker-{POOL}"].name
    assert done.prompt.lane == Lane.LANE_BATCH, "its terms allow no better lane than batch"


async def until(status: int, ask: Callable[[], Awaitable[httpx.Response]]) -> httpx.Response:
    """The first answer with a status."""
    async with asyncio.timeout(START_S):
        while True:
            answer = await ask()
            if answer.status_code == status:
                return answer
            await asyncio.sleep(0.05)


async def test_http_is_answered_to_the_keys_in_the_secret_and_a_revocation_arrives_there(running: Cluster) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{running.http_port}", timeout=START_S) as client:

        async def completed(key: str) -> httpx.Response:
            body = {"model": POOL, "prompt": "Once upon a time", "max_tokens": 2}
            return await client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})

        key = running.new_key()
        answer = await until(200, lambda: completed(key))
        assert answer.json()["usage"]["completion_tokens"] == 2
        assert answer.headers["x-trunkline-worker"] == running.pods[f"worker-{POOL}"].name
        assert (await completed(f"{key[:-1]}{'a' if key[-1] != 'a' else 'b'}")).status_code == 401
        words = [script("trunkline"), "keys", "revoke", key.split("-")[1], f"--file={running.key_file}"]
        assert (await run(words, {}))[0] == 0
        await until(401, lambda: completed(key))
        assert (await client.get("/health")).status_code == 200


async def test_the_charts_own_test_passes(running: Cluster) -> None:
    (pod,) = running.rendered.of("Pod")
    (container,) = pod["spec"]["containers"]
    words = running.pods["router"].command(container["command"] + container["args"])
    status, out, err = await run(words, running.pods["router"].environment)
    assert (status, err) == (0, "")
    assert out.startswith("Hello")


@pytest.mark.slow
async def test_pods_end_as_the_hooks_say_and_no_stream_notices(running: Cluster) -> None:
    name = f"worker-{POOL}"
    worker, process = running.pods[name], running.processes[name]
    async with Client(f"127.0.0.1:{running.router_port}", model=POOL) as client:
        pieces = client.generate("Once upon a time", max_tokens=TOKENS, ignore_eos=True)
        tokens = len((await anext(pieces)).token_ids)
        hook = worker.command(worker.container["lifecycle"]["preStop"]["exec"]["command"])
        engine = only_child(process)
        os.kill(engine, signal.SIGSTOP)  # the stream must still run when the hook is executed
        try:
            draining = asyncio.create_task(run(hook, worker.environment))
            await asyncio.to_thread(wait_until, lambda: not running.is_ready(name), "the worker drains")
        finally:
            os.kill(engine, signal.SIGCONT)
        async for piece in pieces:
            tokens += len(piece.token_ids)
        assert tokens == TOKENS
        assert await draining == (0, "finished 1, cut off 0\n", "")
    assert running.probe(name, "readinessProbe") != SERVING
    assert running.probe(name, "livenessProbe") == SERVING, "or the kubelet would kill what drains"
    assert await run(hook, worker.environment) == (0, "finished 0, cut off 0\n", "")
    for ending in (process, running.processes["router"]):
        ending.popen.terminate()
        assert ending.wait() == 0
    status, _, said = await run(hook, worker.environment)
    assert (status, said.count("\n")) == (1, 1)
    assert said.startswith("trunkline drain: 127.0.0.1:")
