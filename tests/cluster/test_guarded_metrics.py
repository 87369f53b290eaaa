"""Prometheus scrapes a router and a worker that have certificates and identities, as deploy/observability says."""

import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.cluster.processes import Process, script, wait_until
from tests.cluster.prometheus import Prometheus, scraping
from tests.worker.engine_rig import DEMO_MODEL
from trunkline_bench.servers.ports import free_port

pytestmark = pytest.mark.slow

CERTS = Path(__file__).parents[2] / "deploy" / "certs.sh"
TOKEN = "a-token-of-workers-for-prometheus"
DAY_S = 86400
DAYS = 10  # of the certificates: fewer than the fixed limit of the alert
CLIENT_FILES = {"ca_file": "ca.crt", "cert_file": "client.crt", "key_file": "client.key"}


class Guarded(NamedTuple):
    prometheus: Prometheus
    certificates: Path
    urls: dict[str, str]  # of metrics, by job
    user_key: str
    stranger: str  # where a router looks for a worker, and finds a server with a certificate of another name


def created_key(file: Path, role: str) -> str:
    command = [script("trunkline"), "keys", "create", "--tenant", role, "--role", role, "--file", str(file)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    certificates = folder / "certs"
    subprocess.run([CERTS, certificates, str(DAYS)], check=True, capture_output=True)
    keys = folder / "keys.json"
    (folder / "router-key").write_text(created_key(keys, "scraper"))
    user_key = created_key(keys, "user")
    (folder / "worker-token").write_text(TOKEN)
    grpc_port, http_port, worker_port, metrics_port = (free_port() for _ in range(4))

    def own(name: str) -> list[str]:
        return [
            f"--tls-cert={certificates}/{name}.crt",
            f"--tls-key={certificates}/{name}.key",
            f"--tls-client-ca={certificates}/ca.crt",
        ]

    def access(name: str, credentials: str) -> dict[str, Any]:
        files = {kind: str(certificates / file) for kind, file in CLIENT_FILES.items()}
        return {
            "scheme": "https",
            "authorization": {"credentials_file": str(folder / credentials)},
            "tls_config": files | {"server_name": name},
        }

    with ExitStack() as stack:
        worker = Process(
            script("trunkline-worker"), f"--model={DEMO_MODEL}", f"--port={worker_port}", "--threads=1", "--device=cpu",
            "--dtype=float32", "--kv-blocks=256", "--tls-router-names=trunkline-router", *own("worker"),
            f"--metrics-port={metrics_port}", f"--metrics-token-file={folder / 'worker-token'}",
        )  # fmt: skip
        stack.callback(worker.stop)
        stranger = f"127.0.0.1:{grpc_port}"
        router = Process(
            script("trunkline-router"), f"--workers=127.0.0.1:{worker_port},{stranger}", f"--port={grpc_port}",
            f"--http-port={http_port}", f"--api-keys={keys}", *own("router"), f"--worker-tls-ca={certificates}/ca.crt",
            f"--worker-tls-cert={certificates}/router.crt", f"--worker-tls-key={certificates}/router.key",
            "--worker-tls-name=trunkline-worker",
        )  # fmt: skip
        stack.callback(router.stop)
        worker.wait_for("worker ready")
        router.wait_for("worker connected")
        prometheus = stack.enter_context(
            scraping(
                folder,
                [http_port],
                {f"127.0.0.1:{worker_port}": metrics_port},
                access("trunkline-router", "router-key"),
                access("trunkline-worker", "worker-token"),
            )
        )
        ports = {"trunkline-router": http_port, "trunkline-worker": metrics_port}
        urls = {job: f"https://127.0.0.1:{port}/metrics" for job, port in ports.items()}
        yield Guarded(prometheus, certificates, urls, user_key, stranger)


def test_prometheus_may_read_both_and_sees_when_certificates_expire(guarded: Guarded) -> None:
    prometheus = guarded.prometheus

    def of_both(query: str) -> list[float]:
        """The values of a query, once both jobs have been scraped."""

        def values() -> dict[str, float]:
            return {labels["job"]: value for labels, value in prometheus.samples(query)}

        wait_until(lambda: values().keys() == guarded.urls.keys(), f"both have {query}")
        return [*values().values()]

    left = of_both("min by (job) (trunkline_certificate_expires_in_seconds)")
    assert all((DAYS - 1) * DAY_S < seconds <= DAYS * DAY_S for seconds in left)
    lives = of_both('trunkline_certificate_lifetime_seconds{file="certificate"}')
    assert all((DAYS - 1) * DAY_S < seconds <= (DAYS + 1) * DAY_S for seconds in lives)


def test_a_worker_with_a_wrong_certificate_raises_an_alert_and_certificates_that_are_fresh_raise_none(
    guarded: Guarded,
) -> None:
    """It is pending here: it fires after half an hour."""
    asked = 'ALERTS{alertname=~"TrunklineWorkerNotConnected|TrunklineCertificate.+"}'
    wait_until(lambda: guarded.prometheus.has(asked), "the rules have been evaluated")
    ((labels, _),) = guarded.prometheus.samples(asked)
    assert labels["alertname"] == "TrunklineWorkerNotConnected"
    assert (labels["worker"], labels["alertstate"]) == (guarded.stranger, "pending")


@pytest.mark.parametrize("job", ["trunkline-router", "trunkline-worker"])
@pytest.mark.parametrize("credential", ["none", "another", "a user's"])
def test_others_may_not(guarded: Guarded, job: str, credential: str) -> None:
    given = {"none": "", "another": "x" * 40, "a user's": guarded.user_key}[credential]
    request = urllib.request.Request(guarded.urls[job], headers={"Authorization": f"Bearer {given}"} if given else {})
    context = ssl.create_default_context(cafile=str(guarded.certificates / "ca.crt"))
    context.load_cert_chain(guarded.certificates / "client.crt", guarded.certificates / "client.key")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, context=context, timeout=60)
    refused.value.close()
    assert refused.value.code in (401, 403)
