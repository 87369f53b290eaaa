"""The Helm chart, rendered by a real Helm, as objects."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python
import yaml

CHART = Path(__file__).parents[2] / "helm" / "trunkline"
# The oldest version that Chart.yaml allows, and the newest one that the checker knows.
KUBERNETES = ("1.30", "1.37")

Values = dict[str, Any]
Object = dict[str, Any]

HOST_PATH: Values = {"model": {"hostPath": {"path": "/srv/models/tiny"}}}
PLACED: Values = {
    "nodeSelector": {"zone": "a"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
}
SPREAD: Values = {
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
    ]
}

PLAIN: Values = {"allowPlaintext": True, "allowAnonymous": True}
SECURED: Values = {
    "tls": {"routerSecret": "router", "workerSecret": "worker", "redisSecret": "redis"},
    "identity": {"fleetSecret": {"name": "fleet"}},
    "router": {"config": {"api_keys_in_redis": True}},
}
MUTUAL: Values = SECURED | {"tls": {**SECURED["tls"], "clientCertificates": True}}

IDENTITIES: Values = {
    "allowPlaintext": True,
    "workerDefaults": {"env": [{"name": "TRUNKLINE_GRANT_KEY", "value": "a key for tests, of thirty-two bytes"}]},
    "identity": {
        "apiKeys": {"name": "keys", "key": "tenants"},
        "fleetSecret": {"name": "fleet"},
        "jwks": {"name": "issuer"},
    },
    "router": {
        "config": {"jwt_issuer": "https://issuer.example", "jwt_audience": ["trunkline"]},
        "http": {"port": 8080},
    },
}

DEFAULT: Values = {}
SEVERAL_POOLS: Values = {
    "workers": {
        "big": {"model": {"claim": {"name": "weights", "path": "big/v1"}}, "replicas": 3, "gpus": 2, "port": 50062},
        "small": HOST_PATH | {"gpus": 0, "config": {"drain_timeout_s": 7.5, "device": "cpu"}},
    }
}
PASSWORD = "0123456789abcdefABCDEF"
OWN_PASSWORD: Values = {"redis": {"password": PASSWORD, "networkPolicy": {"enabled": False}}}
PASSWORD_IN_SECRET: Values = {"redis": {"existingSecret": {"name": "cache", "key": "word"}}}
EXTERNAL_URL: Values = {"redis": {"enabled": False, "external": {"url": "rediss://cache.example.com:6380/2"}}}
EXTERNAL_SECRET: Values = {"redis": {"enabled": False, "external": {"existingSecret": {"name": "cache"}}}}
NO_REDIS: Values = {"redis": {"enabled": False}}
ACCOUNT_OF_ANOTHER: Values = {"serviceAccount": {"create": False, "name": "shared"}}
EVERYTHING: Values = {
    "image": {"registry": "registry.example.com/llm", "tag": "1.2.3", "pullSecrets": [{"name": "registry"}]},
    "serviceAccount": {"name": "serving", "annotations": {"cloud.example.com/role": "reader"}},
    "router": {
        "priorityClassName": "serving",
        "config": {"processes": 2, "stop_timeout_s": 30.5, "max_choices": 8},
        "tenants": {"acme": {"weight": 3, "lane": "standard"}, "*": {"weight": 1}},
        "service": {"headless": True, "annotations": {"note": "x"}},
        "podDisruptionBudget": {"maxUnavailable": "25%"},
        "env": [{"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "http://collector:4317"}],
        "podAnnotations": {"note": "x"},
        **PLACED,
        **SPREAD,
    },
    "workerDefaults": {
        "runtimeClassName": "nvidia",
        "priorityClassName": "serving",
        "env": [{"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "http://collector:4317"}],
        "podAnnotations": {"note": "x"},
        **PLACED,
        **SPREAD,
    },
    "workers": {
        "gated": {
            "servedName": "org/gated",
            "model": {
                "hub": {
                    "id": "org/gated",
                    "revision": "v1.2",
                    "size": "40Gi",
                    "storageClass": "fast",
                    "tokenSecret": {"name": "hub", "key": "token"},
                }
            },
            "config": {"kv_blocks": 2_000_000, "max_waiting_tokens": 1 << 40, "price_per_hour": 2.5, "kv_dtype": "fp8"},
        },
        "claimed": {"model": {"claim": {"name": "weights"}}},
    },
    "redis": {"priorityClassName": "serving", **PLACED},
    "test": {"resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"cpu": 1, "memory": "256Mi"}}},
    "networkPolicy": {
        "enabled": True,
        "clients": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "apps"}}}],
    },
}
ALL_VALUES = {
    "default": DEFAULT,
    "several pools": SEVERAL_POOLS,
    "own password": OWN_PASSWORD,
    "password in a secret": PASSWORD_IN_SECRET,
    "external redis": EXTERNAL_URL,
    "external redis, secret": EXTERNAL_SECRET,
    "no redis": NO_REDIS,
    "account of another": ACCOUNT_OF_ANOTHER,
    "everything": EVERYTHING,
    "secured": SECURED,
    "mutual": MUTUAL | SEVERAL_POOLS,
    "identities": IDENTITIES,
    "no http": {"router": {"http": {"enabled": False}}},
}


class Rendered:
    """The chart's objects for some values."""

    def __init__(self, values: Values, *, release: str = "demo", namespace: str = "llm") -> None:
        """Plaintext and strangers are permitted unless the values have something to say about either."""
        if not values.keys() & {"tls", "allowPlaintext", "allowAnonymous"}:
            values = PLAIN | values
        with helm_python.Chart.load(CHART) as chart:
            files = chart.render(values, name=release, namespace=namespace)
        self.objects: list[Object] = [
            found
            for name, text in sorted(files.items())
            if not name.endswith(".txt")
            for found in yaml.load_all(text, Loader=yaml.CSafeLoader)
            if found
        ]

    def of(self, *kinds: str) -> list[Object]:
        return [item for item in self.objects if item["kind"] in kinds]

    def one(self, kind: str, name: str) -> Object:
        (found,) = [item for item in self.of(kind) if item["metadata"]["name"] == name]
        return found

    @property
    def pods(self) -> list[Object]:
        """The pod templates of all workloads, and the pod of `helm test`."""
        return [pod_of(workload) for workload in self.workloads] + [pod["spec"] for pod in self.of("Pod")]

    @property
    def workloads(self) -> list[Object]:
        return self.of("Deployment", "StatefulSet")

    def ours(self) -> Iterator[tuple[Object, Object]]:
        """(workload, main container) of routers and workers."""
        for workload in self.workloads:
            (container,) = pod_of(workload)["containers"]
            if container["name"] in ("router", "worker"):
                yield workload, container


def pod_of(workload: Object) -> Object:
    spec: Object = workload["spec"]["template"]["spec"]
    return spec


def selected(selector: Object, workload: Object) -> bool:
    """Whether a selector matches the labels of a workload's pods."""
    labels = workload["spec"]["template"]["metadata"]["labels"]
    return bool(selector.items() <= labels.items())


def port_of(container: Object, name: str = "grpc") -> int:
    """The number of a container's port; 0 if it has none of that name."""
    return sum(port["containerPort"] for port in container["ports"] if port["name"] == name)
