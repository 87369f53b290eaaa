"""The chart's monitors, rules, dashboards and settings of metrics and traces fit each other and the processes."""

import json
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml

from tests.deploy.chart import CHART, HOST_PATH, KUBERNETES, PLAIN, SECURED, Object, Rendered, Values, pod_of, port_of
from tests.deploy.observability import DASHBOARDS, RULES
from trunkline_router.access.identity.needed_roles import PATHS
from trunkline_router.settings import RouterSettings
from trunkline_runtime.settings import parse_settings
from trunkline_runtime.telemetry.metrics_server import PATH
from trunkline_worker.front_settings import WorkerSettings

SHOWN: Values = {
    "monitors": {"enabled": True, "labels": {"release": "monitoring"}},
    "rules": {"enabled": True, "runbooks": "https://docs.acme.example/llm"},
    "dashboards": {"enabled": True, "annotations": {"grafana_folder": "LLM"}},
}
POOLS: Values = {"workers": {"qwen3-0-6b": None, "a": HOST_PATH, "b": HOST_PATH | {"port": 50063}}}
OPEN: Values = PLAIN | POOLS | {"observability": SHOWN | {"workerMetrics": {"enabled": True}}}
GUARDED: Values = (
    SECURED
    | POOLS
    | {
        "networkPolicy": {
            "enabled": True,
            "clients": [{"podSelector": {"matchLabels": {"app": "chat"}}}],
            "scrapers": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
        },
        "observability": SHOWN
        | {
            "monitors": {"enabled": True, "tlsSecret": "prometheus-tls", "interval": "30s"},
            "workerMetrics": {"enabled": True, "port": 9100, "token": {"name": "scraping", "key": "of-workers"}},
            "routerKey": {"name": "scraping", "key": "of-routers"},
            "traces": {"endpoint": "http://collector:4317", "ratio": 0.05},
        },
    }
)
MONITORING = "monitoring.coreos.com/v1"


@pytest.fixture(scope="module")
def open_chart() -> Rendered:
    return Rendered(OPEN)


@pytest.fixture(scope="module")
def guarded() -> Rendered:
    return Rendered(GUARDED)


@pytest.fixture(scope="module", params=["open", "guarded"])
def rendered(request: pytest.FixtureRequest, open_chart: Rendered, guarded: Rendered) -> Rendered:
    return open_chart if request.param == "open" else guarded


def test_helm_has_nothing_to_say_against_the_values() -> None:
    report = helm_python.lint(CHART, GUARDED, strict=True)
    assert report["errors"] == []


def test_every_object_is_what_the_api_knows(rendered: Rendered) -> None:
    for item in rendered.objects:
        if item["apiVersion"] != MONITORING:
            assert kubernetes_validate.validate(item, KUBERNETES[-1], strict=True) == KUBERNETES[-1]


def test_nothing_of_it_is_there_unless_it_was_asked_for() -> None:
    default = Rendered({})
    assert not default.of("ServiceMonitor", "PodMonitor", "PrometheusRule")
    assert not any("dashboard" in item["metadata"]["name"] for item in default.objects)
    for _, container in default.ours():
        assert not any(entry["name"].startswith("OTEL_") for entry in container["env"])
        assert port_of(container, "metrics") == 0


def worker_settings(rendered: Rendered, tmp_path: Path) -> dict[str, WorkerSettings]:
    """By the names of pools."""
    found = {}
    for workload in rendered.of("StatefulSet"):
        name = workload["metadata"]["name"]
        file = tmp_path / name
        file.write_text(rendered.one("ConfigMap", name)["data"]["worker.json"])
        settings = parse_settings(WorkerSettings, [f"--config={file}"], {}, prog="test")
        assert settings.problem() is None
        found[name.rpartition("-")[2]] = settings
    return found


def test_workers_serve_their_metrics_where_prometheus_asks(rendered: Rendered, tmp_path: Path) -> None:
    (monitor,) = rendered.of("PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["path"]) == ("metrics", PATH)
    settings = worker_settings(rendered, tmp_path)
    assert set(settings) == {"a", "b"}
    (chosen,) = monitor["spec"]["selector"]["matchExpressions"]
    for workload in rendered.of("StatefulSet"):
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
        assert labels[chosen["key"]] in chosen["values"]
        (container,) = pod_of(workload)["containers"]
        pool = workload["metadata"]["name"].rpartition("-")[2]
        assert port_of(container, "metrics") == settings[pool].metrics_port > 0
    assert relabeled(endpoint, "job") == {"replacement": "trunkline-worker"}
    assert relabeled(endpoint, "worker") == {"sourceLabels": ["__meta_kubernetes_pod_name"]}


def relabeled(endpoint: Object, label: str) -> Object:
    (found,) = [rule for rule in endpoint["relabelings"] if rule["targetLabel"] == label]
    return {name: value for name, value in found.items() if name != "targetLabel"}


def test_routers_serve_their_metrics_where_prometheus_asks(rendered: Rendered) -> None:
    (monitor,) = rendered.of("ServiceMonitor")
    (endpoint,) = monitor["spec"]["endpoints"]
    service = rendered.one("Service", "demo-trunkline-router")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert f"GET {endpoint['path']}" in PATHS
    assert relabeled(endpoint, "job") == {"replacement": "trunkline-router"}


@pytest.mark.parametrize("values", [OPEN, GUARDED], ids=["open", "guarded"])
def test_each_process_of_a_router_is_a_target_of_its_own(values: Values, tmp_path: Path) -> None:
    router = values.get("router", {})
    rendered = Rendered(values | {"router": router | {"config": router.get("config", {}) | {"processes": 3}}})
    assert not rendered.of("ServiceMonitor")
    monitor = rendered.one("PodMonitor", "demo-trunkline-router")
    endpoints = monitor["spec"]["podMetricsEndpoints"]
    (container,) = pod_of(workload := rendered.one("Deployment", "demo-trunkline-router"))["containers"]
    labels = workload["spec"]["template"]["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    file = tmp_path / "router.json"
    file.write_text(rendered.one("ConfigMap", "demo-trunkline-router")["data"]["router.json"])
    settings = parse_settings(RouterSettings, [f"--config={file}"], {}, prog="test")
    for number, endpoint in enumerate(endpoints):
        assert port_of(container, endpoint["port"]) == settings.process_metrics_port + number > 0
        assert endpoint["path"] == PATH
        assert relabeled(endpoint, "job") == {"replacement": "trunkline-router"}
        assert ("authorization" in endpoint, "tlsConfig" in endpoint) == (values is GUARDED, values is GUARDED)
    assert len(endpoints) == settings.processes == 3
    if values is GUARDED:
        policy = rendered.one("NetworkPolicy", "demo-trunkline-router")["spec"]["ingress"]
        ports = [{"port": endpoint["port"]} for endpoint in endpoints]
        assert {"ports": ports, "from": GUARDED["networkPolicy"]["scrapers"]} in policy


def test_prometheus_presents_what_routers_and_workers_demand(
    open_chart: Rendered, guarded: Rendered, tmp_path: Path
) -> None:
    for rendered in (open_chart, guarded):
        (router,) = rendered.of("ServiceMonitor")[0]["spec"]["endpoints"]
        (worker,) = rendered.of("PodMonitor")[0]["spec"]["podMetricsEndpoints"]
        settings = worker_settings(rendered, tmp_path)["a"]
        if rendered is open_chart:
            assert settings.metrics_anonymous
            assert not {"authorization", "tlsConfig", "scheme"} & (router.keys() | worker.keys())
            continue
        assert not settings.metrics_anonymous
        assert settings.metrics_token_file == "/etc/trunkline-metrics-token/token"
        assert router["authorization"]["credentials"] == {"name": "scraping", "key": "of-routers"}
        assert worker["authorization"]["credentials"] == {"name": "scraping", "key": "of-workers"}
        for endpoint, name in ((router, "trunkline-router"), (worker, "trunkline-worker")):
            assert (endpoint["scheme"], endpoint["interval"]) == ("https", "30s")
            assert endpoint["tlsConfig"]["serverName"] == name
            assert endpoint["tlsConfig"]["keySecret"] == {"name": "prometheus-tls", "key": "tls.key"}
        pod = pod_of(rendered.of("StatefulSet")[0])
        (volume,) = [one["secret"] for one in pod["volumes"] if one["name"] == "metrics-token"]
        assert (volume["secretName"], volume["items"]) == ("scraping", [{"key": "of-workers", "path": "token"}])
        (mount,) = [one for one in pod["containers"][0]["volumeMounts"] if one["name"] == "metrics-token"]
        assert settings.metrics_token_file == f"{mount['mountPath']}/token"


def test_only_prometheus_reaches_the_metrics_where_policies_are_on(guarded: Rendered) -> None:
    scrapers = GUARDED["networkPolicy"]["scrapers"]
    policies = {item["metadata"]["name"]: item["spec"]["ingress"] for item in guarded.of("NetworkPolicy")}
    for pool in ("a", "b"):
        of_routers, of_scrapers = policies[f"demo-trunkline-worker-{pool}"]
        assert of_routers["ports"] == [{"port": "grpc"}]
        assert of_scrapers == {"ports": [{"port": "metrics"}], "from": scrapers}
    assert {"ports": [{"port": "http"}], "from": scrapers} in policies["demo-trunkline-router"]


def test_rules_are_those_of_the_file_with_links_to_ones_own_runbooks(rendered: Rendered) -> None:
    (rule,) = rendered.of("PrometheusRule")
    expected = yaml.safe_load(RULES.read_text())
    for annotations in (one["annotations"] for group in expected["groups"] for one in group["rules"] if "alert" in one):
        section = annotations["runbook"].removeprefix("docs/runbooks.md")
        annotations["runbook_url"] = SHOWN["rules"]["runbooks"] + section
    assert rule["spec"] == expected


def test_dashboards_are_those_of_the_files_and_carry_the_label(rendered: Rendered) -> None:
    found: dict[str, Any] = {}
    for item in rendered.of("ConfigMap"):
        if "grafana_dashboard" in item["metadata"]["labels"]:
            assert item["metadata"]["annotations"] == {"grafana_folder": "LLM"}
            found |= {name: json.loads(text) for name, text in item["data"].items()}
    assert found == {f"trunkline-{file.stem}.json": json.loads(file.read_text()) for file in DASHBOARDS}


def test_routers_and_workers_send_traces_to_the_collector(guarded: Rendered) -> None:
    for _, container in guarded.ours():
        told = {entry["name"]: entry.get("value") for entry in container["env"]}
        assert told["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://collector:4317"
        assert (told["OTEL_TRACES_SAMPLER"], told["OTEL_TRACES_SAMPLER_ARG"]) == ("parentbased_traceidratio", "0.05")


def test_labels_of_monitors_are_those_that_ones_prometheus_looks_for(open_chart: Rendered) -> None:
    for item in open_chart.of("ServiceMonitor", "PodMonitor"):
        assert item["metadata"]["labels"]["release"] == "monitoring"


def observed(values: Values, **observability: Values) -> Values:
    return values | {"observability": observability}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (observed(SECURED, workerMetrics={"enabled": True}), "any client could read the metrics of workers: set token"),
        (observed(SECURED, monitors={"enabled": True}), "demand certificates of their clients: set monitors.tlsSecret"),
        (
            observed(SECURED, monitors={"enabled": True, "tlsSecret": "prometheus-tls"}),
            "routers serve their metrics to the role scraper: set observability.routerKey",
        ),
    ],
)
def test_metrics_that_none_could_read_or_that_all_could_read_are_refused(values: Values, said: str) -> None:
    with pytest.raises(helm_python.HelmRenderError) as caught:
        Rendered(values)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value).strip()
