"""The chart keeps the password that is in the cluster, rendered by a real Helm against a simulated API server.

The server answers Helm's requests, and has one Secret; nothing is installed.
"""

import json
import re
import threading
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import helm_python
import pytest
import yaml

from tests.deploy.chart import CHART, PASSWORD, PLAIN, Values

GROUPS = {
    "v1": {"secrets": "Secret", "services": "Service", "serviceaccounts": "ServiceAccount", "configmaps": "ConfigMap"},
    "apps/v1": {"deployments": "Deployment", "statefulsets": "StatefulSet"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy"},
}
SECRET = "/api/v1/namespaces/llm/secrets/demo-trunkline-redis"
IN_CLUSTER = "theOneThatIsThere0123456789"
# An empty schema: Helm validates nothing here. Other tests do.
OPENAPI = "/openapi/v2"


def answers(password: str | None) -> dict[str, Any]:
    """Answers GET requests by path; all other paths are not found."""
    said: dict[str, Any] = {
        "/version": {"major": "1", "minor": "30", "gitVersion": "v1.30.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {
            "kind": "APIGroupList",
            "groups": [
                {"name": name.partition("/")[0], "versions": [{"groupVersion": name, "version": "v1"}]}
                for name in GROUPS
                if "/" in name
            ],
        },
    }
    for name, kinds in GROUPS.items():
        resources = [
            {"name": plural, "namespaced": True, "kind": kind, "verbs": ["get"]} for plural, kind in kinds.items()
        ]
        said[f"/{'apis' if '/' in name else 'api'}/{name}"] = {
            "kind": "APIResourceList",
            "groupVersion": name,
            "resources": resources,
        }
    if password is not None:
        said[SECRET] = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {
                "name": "demo-trunkline-redis",
                "labels": {"app.kubernetes.io/managed-by": "Helm"},
                "annotations": {"meta.helm.sh/release-name": "demo", "meta.helm.sh/release-namespace": "llm"},
            },
            "data": {"password": b64encode(password.encode()).decode()},
        }
    return said


@contextmanager
def api_server(password: str | None) -> Iterator[str]:
    """The URL of a server whose release was installed with this password; None: not installed yet."""
    known = answers(password)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            body = b"" if path == OPENAPI else json.dumps(known.get(path, {"kind": "Status", "code": 404})).encode()
            self.send_response(200 if path == OPENAPI or path in known else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Drops the access log."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


def password_where_there_is(password: str | None, values: Values) -> str:
    """The objects that Helm would install."""
    context = {"name": "here", "context": {"cluster": "here", "user": "me"}}
    with api_server(password) as url:
        kubeconfig = {
            "clusters": [{"name": "here", "cluster": {"server": url}}],
            "users": [{"name": "me", "user": {}}],
            "contexts": [context],
            "current-context": "here",
        }
        with helm_python.Config(
            kubeconfig_content=json.dumps(kubeconfig), namespace="llm", storage_driver="memory"
        ) as config:
            manifest = config.install(CHART, "demo", PLAIN | values, namespace="llm", dry_run="server")["manifest"]
    (secret,) = [item for item in yaml.safe_load_all(manifest) if item and item["kind"] == "Secret"]
    return b64decode(secret["data"]["password"]).decode()


@pytest.mark.parametrize(
    ("in_cluster", "values", "wanted"),
    [
        (None, {}, "[A-Za-z0-9]{32}"),
        (IN_CLUSTER, {}, IN_CLUSTER),
        (IN_CLUSTER, {"redis": {"password": PASSWORD}}, PASSWORD),
    ],
    ids=["drawn at first", "kept then", "replaced by one that is given"],
)
def test_an_upgrade_keeps_the_password_that_was_drawn(in_cluster: str | None, values: Values, wanted: str) -> None:
    assert re.fullmatch(wanted, password_where_there_is(in_cluster, values))
