"""A real Prometheus that scrapes each second, with our rules."""

import json
import re
import shutil
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml

from tests.cluster.processes import Process, wait_until
from tests.deploy.observability import OBSERVABILITY, RULES
from trunkline_bench.servers.ports import free_port

QUERY_TIMEOUT_S = 60.0  # for failures only
Access = Mapping[str, Any]
RATE = "10m"  # in place of the interval and the range of Grafana: all that a test has loaded a cluster with


class Prometheus:
    """Answers queries."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def _get(self, path: str, **parameters: str) -> Any:
        url = f"{self.url}{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=QUERY_TIMEOUT_S) as answer:
            return json.load(answer)["data"]

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=QUERY_TIMEOUT_S) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def samples(self, expr: str, at_unix_s: float | None = None) -> list[tuple[dict[str, str], float]]:
        """(labels, value) of each sample of a query's answer at a time, by default now."""
        when = {} if at_unix_s is None else {"time": str(at_unix_s)}
        found = self._get("/api/v1/query", query=expr, **when)["result"]
        return [(one["metric"], float(one["value"][1])) for one in found]

    def has(self, expr: str) -> bool:
        """Whether a query returns a number."""
        return any(value == value for _, value in self.samples(expr))  # NaN is unequal to itself

    def label_values(self, asked: str) -> list[str]:
        """What a variable of a dashboard offers: label_values(SELECTOR, LABEL), as Grafana asks for it."""
        found = re.fullmatch(r"label_values\((.+), (\w+)\)", asked)
        assert found is not None, asked
        selector, label = found.groups()
        values: list[str] = self._get(f"/api/v1/label/{label}/values", **{"match[]": selector, "start": "0"})
        return values

    def exemplars(self, expr: str) -> list[dict[str, str]]:
        """The labels of a query's exemplars of the last minutes."""
        found = self._get("/api/v1/query_exemplars", query=expr, start="0", end="9999999999")
        return [exemplar["labels"] for series in found for exemplar in series["exemplars"]]

    def targets_down(self) -> list[str]:
        """Why targets cannot be scraped."""
        return [one["lastError"] for one in self._get("/api/v1/targets")["activeTargets"] if one["health"] != "up"]

    def rule_problems(self) -> list[str]:
        """Errors of rules."""
        groups = self._get("/api/v1/rules")["groups"]
        return [rule["lastError"] for group in groups for rule in group["rules"] if rule.get("lastError")]


def with_variables_set(expr: str) -> str:
    """A query of a dashboard as Grafana sends it when everything is chosen."""
    expr = expr.replace("$__rate_interval", RATE).replace("$__range", RATE)
    return re.sub(r"\$\w+", ".*", expr)


@contextmanager
def scraping(
    folder: Path,
    routers: list[int],
    workers: dict[str, int],
    router_access: Access = MappingProxyType({}),
    worker_access: Access = MappingProxyType({}),
) -> Iterator[Prometheus]:
    """A Prometheus. routers: their HTTP ports; workers: ports of metrics by worker id; access: further settings of the
    jobs, such as credentials"""
    config = yaml.safe_load((OBSERVABILITY / "prometheus.yaml").read_text())
    config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    router, worker = config["scrape_configs"]
    router["static_configs"] = [{"targets": [f"127.0.0.1:{port}" for port in routers]}]
    worker["static_configs"] = [
        {"targets": [f"127.0.0.1:{port}"], "labels": {"worker": worker_id}} for worker_id, port in workers.items()
    ]
    router.update(router_access)
    worker.update(worker_access)
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    (folder / RULES.name).write_text(RULES.read_text().replace("interval: 30s", "interval: 1s"))
    with running(folder / "prometheus.yaml", folder / "data", "--enable-feature=exemplar-storage") as prometheus:
        yield prometheus


@contextmanager
def running(config: Path, data: Path, *flags: str) -> Iterator[Prometheus]:
    """A Prometheus with this configuration and this folder of data."""
    executable = shutil.which("prometheus")
    if executable is None:
        pytest.skip("Prometheus is absent (Debian's package prometheus), and it is optional: it scraped nothing")
    port = free_port()
    process = Process(
        executable,
        f"--config.file={config}",
        f"--storage.tsdb.path={data}",
        f"--web.listen-address=127.0.0.1:{port}",
        *flags,
    )
    try:
        found = Prometheus(port)
        wait_until(found.is_ready, "Prometheus is ready")
        yield found
    finally:
        process.stop()
