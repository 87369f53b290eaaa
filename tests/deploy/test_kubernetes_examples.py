"""The examples for autoscalers and gateways fit what the chart installs, and ask Prometheus for what there is."""

import re

import pytest

from tests.deploy.chart import HOST_PATH, Object, Rendered, port_of
from tests.deploy.observability import manifests, metrics_in
from tests.metrics_page import rows

# Parameters of KEDA's trigger prometheus: pkg/scalers/prometheus_scaler.go of kedacore/keda, August 2026.
PARAMETERS = {"serverAddress", "query", "threshold", "activationThreshold", "ignoreNullValues", "namespace", "timeout"}


@pytest.fixture(scope="module")
def rendered() -> Rendered:
    """As the examples assume it: release trunkline, namespace llm, pool and model large."""
    return Rendered({"workers": {"qwen3-0-6b": None, "large": HOST_PATH}}, release="trunkline")


def scaled() -> Object:
    (found,) = manifests("keda.yaml")
    return found


def test_the_autoscaler_scales_the_workers_of_a_pool(rendered: Rendered) -> None:
    spec, name = scaled()["spec"], scaled()["spec"]["scaleTargetRef"]["name"]
    workload = rendered.one("StatefulSet", name)
    target = {"apiVersion": workload["apiVersion"], "kind": workload["kind"], "name": name}
    assert spec["scaleTargetRef"] == target
    assert 1 <= spec["minReplicaCount"] <= spec["fallback"]["replicas"] <= spec["maxReplicaCount"]


def test_triggers_are_as_the_autoscaler_takes_them_and_ask_for_metrics_of_workers() -> None:
    served = {row.name for row in rows("worker")}
    triggers = scaled()["spec"]["triggers"]
    assert len({trigger["name"] for trigger in triggers}) == len(triggers)
    for trigger in triggers:
        told = trigger["metadata"]
        assert trigger["type"] == "prometheus"
        assert trigger["metricType"] in ("AverageValue", "Value"), "Utilization is for CPU and memory alone"
        assert told.keys() <= PARAMETERS
        assert all(isinstance(value, str) for value in told.values()), "numbers and booleans must be strings"
        assert float(told["threshold"]) > 0
        assert told["ignoreNullValues"] == "false", "a model without metrics would count as idle"
        assert metrics_in(told["query"]) <= served
        assert re.findall(r'model_name="(\w+)"', told["query"]) == ["large"]


def test_routes_lead_to_ports_of_the_routers_service(rendered: Rendered) -> None:
    router = rendered.one("Deployment", "trunkline-router")["spec"]["template"]["spec"]["containers"][0]
    led = {}
    for route in manifests("routes.yaml"):
        for rule in route["spec"]["rules"]:
            for backend in rule["backendRefs"]:
                service = rendered.one("Service", backend["name"])
                (port,) = [port for port in service["spec"]["ports"] if port["port"] == backend["port"]]
                led[route["kind"]] = port["name"]
                assert port_of(router, port["name"]) == backend["port"]
    assert led == {"HTTPRoute": "http", "GRPCRoute": "grpc"}
