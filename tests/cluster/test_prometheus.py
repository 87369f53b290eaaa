"""A real Prometheus scrapes a real cluster under mixed load: all queries of our dashboards, rules and autoscalers
return data, and all metrics that dashboards of others know have some."""

import asyncio
import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster.collector import collecting
from tests.cluster.mixed_load import MODEL, MixedLoad
from tests.cluster.mixed_load import TENANTS as TENANTS_OF_LOAD
from tests.cluster.processes import Process, Worker, script, wait_until
from tests.cluster.prometheus import Prometheus, scraping, with_variables_set
from tests.deploy.observability import (
    DASHBOARDS,
    alerts,
    dashboard_queries,
    foreign_names,
    manifests,
    metrics_in,
    rules,
)
from tests.worker.engine_rig import DEMO_MODEL
from trunkline_bench.servers.ports import free_port, two_free_ports
from trunkline_bench.servers.redis_server import RedisServer

pytestmark = pytest.mark.slow

LOAD_S = 30.0
ANSWERED_BEFORE_LOSS = 48  # each kind of request some times
KV_BLOCKS = 256
TENANTS = {
    "acme": {"weight": 3, "lane": "interactive", "requests_per_minute": 100000, "tokens_per_minute": 100000000},
    "greedy": {"lane": "interactive", "requests_per_minute": 5},
    "*": {"lane": "interactive"},
}
# Metrics that this cluster cannot have, and why. Queries of these alone return nothing.
ABSENT = {
    "there is no GPU": {
        *("trunkline_gpu_busy_ratio", "trunkline_gpu_memory_busy_ratio", "trunkline_gpu_memory_used_bytes"),
        *("trunkline_gpu_power_watts", "trunkline_gpu_temperature_celsius"),
    },
    "there is no TLS": {"trunkline_certificate_expires_in_seconds", "trunkline_certificate_lifetime_seconds"},
    "no request kills engines": {"trunkline_router_quarantines_total"},
    "the model calls no tools": {"trunkline_router_tool_calls_total"},
    "the model has no experts": {"trunkline_worker_expert_imbalance"},
}
NOT_HERE = {name for names in ABSENT.values() for name in names}


class Scraped(NamedTuple):
    prometheus: Prometheus
    router_ports: list[int]
    worker_ports: list[int]


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    """After mixed load in which a worker was killed and came back."""
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "tenants.json").write_text(json.dumps(TENANTS))
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer())
        environment = {**stack.enter_context(collecting()).environment(), "OTEL_METRICS_EXPORTER": "none"}
        ports = {free_port(): free_port() for _ in range(2)}  # of metrics, by port

        def worker(port: int) -> Worker:
            flags = (
                "--dtype=float32",
                f"--kv-blocks={KV_BLOCKS}",
                "--price-per-hour=2.5",
                f"--metrics-port={ports[port]}",
            )
            peaks = ("--peak-tflops=0.5", "--peak-gb-per-s=20")
            started = Worker(DEMO_MODEL, *flags, *peaks, port=port, environment=environment)
            stack.callback(started.stop)
            return started

        workers = [worker(port) for port in ports]
        grpc_port, http_port, metrics_port = free_port(), free_port(), two_free_ports()
        router = Process(
            script("trunkline-router"),
            f"--workers={','.join(one.address for one in workers)}",
            f"--port={grpc_port}",
            f"--http-port={http_port}",
            "--processes=2",
            f"--process-metrics-port={metrics_port}",
            f"--redis-url=redis://127.0.0.1:{redis.port}",
            f"--tenants={folder / 'tenants.json'}",
            environment=environment,
        )
        stack.callback(router.stop)
        for one in workers:
            one.wait_ready()
        router.wait_for("worker connected")
        addresses = {f"127.0.0.1:{port}": ports[port] for port in ports}
        prometheus = stack.enter_context(scraping(folder, [metrics_port, metrics_port + 1], addresses))
        wait_until(lambda: prometheus.targets_down() == [], "all targets are scraped")
        url = f"http://127.0.0.1:{http_port}"
        asyncio.run(under_load(MixedLoad(f"127.0.0.1:{grpc_port}", url), workers, worker, prometheus))
        wait_until(lambda: prometheus.targets_down() == [], "the worker that came back is scraped")
        yield Scraped(prometheus, [metrics_port, metrics_port + 1], list(ports.values()))


async def under_load(
    load: MixedLoad, workers: list[Worker], restarted: Callable[[int], Worker], prometheus: Prometheus
) -> None:
    """Half a minute of mixed load, and longer until a worker whose engine is killed under streams has come back: some
    queries return what there was in the last minute."""
    began_s = time.monotonic()

    killed: list[Worker] = []
    mended = asyncio.Event()

    def kill(address: str) -> None:
        killed.extend(one for one in workers if one.address == address)
        os.kill(killed[0].engine_pid(), signal.SIGKILL)

    def mend() -> None:
        killed[0].process.wait()
        restarted(killed[0].port).wait_ready()

    def see(expr: str) -> None:
        wait_until(lambda: prometheus.has(expr), f"Prometheus has {expr}")

    async def lose_one() -> None:
        await load.until_answered(ANSWERED_BEFORE_LOSS)
        # A rate needs a sample from before the loss.
        await asyncio.to_thread(see, "trunkline_router_failover_silence_seconds_count")
        await load.many_streams(kill)
        await asyncio.to_thread(mend)
        mended.set()

    await asyncio.gather(
        load.run(lambda: mended.is_set() and time.monotonic() - began_s > LOAD_S),
        lose_one(),
        load.client_that_does_not_read(lambda: asyncio.to_thread(see, "trunkline_router_unread_bytes > 0")),
    )
    assert load.answered > ANSWERED_BEFORE_LOSS


def test_each_query_of_the_dashboards_returns_data(scraped: Scraped) -> None:
    silent = {
        asked.place: asked.expr
        for asked in dashboard_queries()
        if not metrics_in(asked.expr) & NOT_HERE and not scraped.prometheus.has(with_variables_set(asked.expr))
    }
    assert silent == {}


def test_variables_of_the_dashboards_offer_what_there_is(scraped: Scraped) -> None:
    offered = {
        variable["name"]: scraped.prometheus.label_values(variable["definition"].replace("$model", ".*"))
        for file in DASHBOARDS
        for variable in json.loads(file.read_text())["templating"]["list"]
        if variable["type"] == "query"
    }
    assert offered["model"] == [MODEL]
    assert set(offered["tenant"]) == set(TENANTS_OF_LOAD)
    assert len(offered["worker"]) == len(scraped.worker_ports)


def test_an_autoscaler_gets_one_number_from_each_of_its_queries(scraped: Scraped) -> None:
    (scaled,) = [one for one in manifests("keda.yaml") if one["kind"] == "ScaledObject"]
    for trigger in scaled["spec"]["triggers"]:
        expr = trigger["metadata"]["query"].replace('"large"', f'"{MODEL}"')
        ((_, value),) = scraped.prometheus.samples(expr)
        assert 0 <= value < 100, trigger["name"]
        assert scraped.prometheus.samples(trigger["metadata"]["query"]) == [], "there is no model large"


def test_an_endpoint_picker_finds_in_each_worker_what_the_protocol_of_model_servers_names(scraped: Scraped) -> None:
    """docs/proposals/003-model-server-protocol of kubernetes-sigs/gateway-api-inference-extension."""
    for port in scraped.worker_ports:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            families = {one.name: one for one in text_string_to_metric_families(answer.read().decode())}
        for name in ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"):
            (sample,) = families[name].samples
            assert families[name].type == "gauge"
            assert sample.value >= 0
        (sample,) = families["vllm:cache_config_info"].samples
        assert int(sample.labels["block_size"]) * int(sample.labels["num_gpu_blocks"]) == 16 * KV_BLOCKS


def test_each_recording_rule_and_each_metric_of_an_alert_has_data(scraped: Scraped) -> None:
    assert scraped.prometheus.rule_problems() == []
    names = {rule["record"] for rule in rules() if "record" in rule}
    for rule in alerts().values():
        names |= metrics_in(rule["expr"])
    assert silent_names(scraped.prometheus, names - NOT_HERE) == set()


def test_each_metric_of_other_dashboards_has_data(scraped: Scraped) -> None:
    served, absent = foreign_names()
    assert silent_names(scraped.prometheus, served) == set()
    assert silent_names(scraped.prometheus, absent) == absent, "these are served now: take them off the list"


def silent_names(prometheus: Prometheus, names: set[str]) -> set[str]:
    """Metrics without a sample. A histogram has its samples under longer names."""
    return {name for name in names if not prometheus.has(f'{{__name__=~"{name}(_bucket)?"}}')}


def test_requests_in_histograms_have_the_ids_of_their_traces(scraped: Scraped) -> None:
    for histogram in ("trunkline_router_first_token_seconds", "gen_ai_server_request_duration_seconds"):
        found = scraped.prometheus.exemplars(f"{histogram}_bucket")
        assert found
        assert all(len(labels["trace_id"]) == 32 for labels in found)


def test_promtool_has_nothing_to_say_against_the_metrics(scraped: Scraped) -> None:
    for port in (*scraped.router_ports, *scraped.worker_ports):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            text = answer.read()
        done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)
        said = done.stdout.decode() + done.stderr.decode()
        problems = [line for line in said.splitlines() if not line.startswith("vllm:")]
        assert (done.returncode in (0, 3), problems) == (True, []), said


def test_the_lost_worker_is_in_the_numbers(scraped: Scraped) -> None:
    counted = scraped.prometheus.samples("sum by (worker) (trunkline_router_worker_losses_total) > 0")
    assert len(counted) == 1
