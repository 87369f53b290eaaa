"""Servers that would be open or readable from elsewhere do not start, and say why in one line."""

import subprocess

import pytest

from tests.cluster.processes import script
from trunkline_router.main import router_settings
from trunkline_runtime.settings import parse_settings
from trunkline_worker.front_settings import WorkerSettings

KEY = "k" * 32
TLS = ("--tls-cert=/absent.crt", "--tls-key=/absent.key")
HERE = "--workers=127.0.0.1:1"
ELSEWHERE = "--workers=worker.example.com:1"

ROUTERS = {
    "the port": ((HERE, "--host=0.0.0.0", "--allow-anonymous"), "--host=0.0.0.0 can be reached from elsewhere without"),
    "a worker elsewhere": ((ELSEWHERE,), "--workers=worker.example.com:1 is not on the loopback interface"),
    "Redis elsewhere": ((HERE, "--redis-url=redis://:secret@redis:6379/0"), "--redis-url is not on the loopback"),
    "half a pair": ((HERE, "--tls-cert=a"), "--tls-cert needs --tls-key"),
    "the other half": ((HERE, "--tls-key=a"), "--tls-key needs --tls-cert"),
    "an authority without a certificate": ((HERE, "--tls-client-ca=a"), "--tls-client-ca needs --tls-cert"),
    "half a pair for workers": ((HERE, "--worker-tls-cert=a"), "--worker-tls-cert needs --worker-tls-key"),
    "a name for workers": ((HERE, "--worker-tls-name=a"), "--worker-tls-name needs --worker-tls-ca"),
    "TLS of Redis without its URL": ((HERE, "--redis-tls-ca=a"), "--redis-tls-ca needs a --redis-url that begins"),
    "half a pair for Redis": ((HERE, "--redis-tls-key=a"), "--redis-tls-key needs --redis-tls-cert"),
}


@pytest.mark.parametrize("case", ROUTERS)
def test_a_router_does_not_start(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, said = ROUTERS[case]
    with pytest.raises(SystemExit) as caught:
        router_settings(arguments)
    printed = capsys.readouterr().err
    assert caught.value.code == 2
    assert printed.startswith(f"trunkline-router: {said}")
    assert printed.count("\n") == 1
    assert "secret" not in printed


@pytest.mark.parametrize(
    "arguments",
    [
        (HERE,),
        (HERE, "--host=::1"),
        (HERE, "--host=0.0.0.0", *TLS),
        (ELSEWHERE, "--worker-tls-ca=a"),
        (HERE, "--redis-url=rediss://redis:6379/0"),
        (HERE, "--redis-url=unix:///run/redis.sock"),
        (ELSEWHERE, "--host=0.0.0.0", "--redis-url=redis://redis:6379/0", "--allow-plaintext"),
        ("--workers=dns:workers:1",),  # each address is checked when it is known
    ],
)
def test_routers_with_tls_on_loopback_or_by_the_switch_may_start(arguments: tuple[str, ...]) -> None:
    assert router_settings((*arguments, "--allow-anonymous")).workers


WORKERS = {
    "plaintext": (("--host=0.0.0.0", f"--grant-key={KEY}"), "--host=0.0.0.0 can be reached from elsewhere without TLS"),
    "anonymous": (("--host=0.0.0.0", "--allow-plaintext"), "--host=0.0.0.0 can be reached from elsewhere, and the"),
    "names without an authority": (("--tls-router-names=r", *TLS), "--tls-router-names needs --tls-client-ca"),
    "half a pair": (("--tls-cert=a",), "--tls-cert needs --tls-key"),
    "a short previous key": ((f"--grant-key={KEY}", "--grant-key-previous=k"), "--grant-key-previous has 1 bytes"),
}


def worker_problem(arguments: tuple[str, ...]) -> str | None:
    return parse_settings(WorkerSettings, ["--model=/absent", *arguments], {}, prog="trunkline-worker").problem()


@pytest.mark.parametrize("case", WORKERS)
def test_a_worker_does_not_start(case: str) -> None:
    arguments, said = WORKERS[case]
    problem = worker_problem(arguments)
    assert problem is not None
    assert problem.startswith(said)
    assert "\n" not in problem
    assert KEY not in problem


@pytest.mark.parametrize(
    "arguments",
    [
        ("--host=0.0.0.0", *TLS, f"--grant-key={KEY}"),
        ("--host=0.0.0.0", *TLS, "--tls-client-ca=/absent", "--tls-router-names=r"),
        ("--host=0.0.0.0", "--allow-plaintext", "--allow-anonymous"),
        (),
    ],
)
def test_workers_with_tls_and_identity_on_loopback_or_by_the_switches_may_start(arguments: tuple[str, ...]) -> None:
    assert worker_problem(arguments) is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--host=0.0.0.0",), "--host=0.0.0.0 can be reached from elsewhere without TLS"),
        ((f"--tls-cert={__file__}", f"--tls-key={__file__}"), f"{__file__} and {__file__} are not a certificate"),
    ],
)
def test_a_worker_ends_with_one_line_before_it_reads_its_model(arguments: tuple[str, ...], said: str) -> None:
    command = [script("trunkline-worker"), "--model=/absent", "--port=0", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith(f"trunkline-worker: {said}")
    assert done.stderr.count("\n") == 1
