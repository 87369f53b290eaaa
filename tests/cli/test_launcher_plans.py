"""The launcher's decisions before it starts processes, and its handling of processes that fail."""

import asyncio
import contextlib
import dataclasses
import os
import signal
import socket
import sys
from pathlib import Path
from random import Random

import pytest

from tests.cluster.processes import alive, wait_until
from trunkline_cli import launcher
from trunkline_cli import plan as plans
from trunkline_cli.backoff import Backoff
from trunkline_cli.child import Child, describe_status
from trunkline_cli.launcher import Cluster
from trunkline_cli.main import METRICS_PORT, metrics_port
from trunkline_cli.passed_flags import FlagError, PassedFlags
from trunkline_cli.plan import ClusterPlan, LaunchError, check_port


def plan(host: str = "127.0.0.1", port: int = 50051, worker_port: int = 50061, workers: int = 2) -> ClusterPlan:
    return ClusterPlan(Path("m"), "m", workers, host, port, worker_port)


def test_threads_are_shared_out_and_never_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert "--threads=4" in plan(workers=2).worker_command(0)
    assert "--threads=1" in plan(workers=20).worker_command(0)


def test_the_router_is_told_every_workers_address() -> None:
    assert "--workers=127.0.0.1:50061,127.0.0.1:50062" in plan().router_command()
    assert "--workers=[::1]:50061,[::1]:50062" in plan(host="::1").router_command()


def test_each_flag_goes_to_the_servers_that_have_it() -> None:
    of_workers = ["--kv-blocks=9", "--dtype", "float32", "--deterministic"]
    of_router = ["--max-stored-responses", "10", "--open=metrics", "--no-follow-leases", "--processes", "1"]
    of_both = ["--allow-plaintext", "--grant-key", "x"]
    flags = PassedFlags.of([*of_router, *of_workers, *of_both])
    assert flags == PassedFlags(router=(*of_router, *of_both), workers=(*of_workers, *of_both))
    made = dataclasses.replace(plan(), flags=flags)
    assert made.router_command()[-len(flags.router) :] == [*flags.router], "the last flag wins: the user's"
    assert made.worker_command(0)[-len(flags.workers) :] == [*flags.workers]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nope"], "unrecognized arguments: --nope"),
        (["--kv-blocks=9", "--nope", "3", "--deterministic"], "unrecognized arguments: --nope 3"),
        (["extra"], "unrecognized arguments: extra"),
        (["--tls-cert=a"], "--tls-cert cannot be passed on: serve connects its processes without TLS"),
        (["--config", "a"], "--config cannot be passed on: the router and the workers have different settings; "
         "pass them as flags"),
    ],
)  # fmt: skip
def test_a_flag_that_no_server_can_get_is_one_line_that_names_it(arguments: list[str], said: str) -> None:
    with pytest.raises(FlagError) as caught:
        PassedFlags.of(arguments)
    assert str(caught.value) == said


def test_the_router_stores_responses_unless_it_is_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan().environment("router") == {"TRUNKLINE_MAX_STORED_RESPONSES": "1000"}
    several = dataclasses.replace(plan(), flags=PassedFlags.of(["--processes", "2"]))
    assert several.environment("router") == {}, "they cannot store any"
    for name in ("TRUNKLINE_MAX_STORED_RESPONSES", "TRUNKLINE_PROCESSES"):
        with monkeypatch.context() as patched:
            patched.setenv(name, "2")
            assert plan().environment("router") == {}


def test_each_worker_has_a_port_for_metrics_of_its_own() -> None:
    assert "--metrics-port=-1" in plan().worker_command(0)
    made = dataclasses.replace(plan(), metrics_port=9101)
    assert made.metrics_ports() == [9101, 9102]
    assert "--metrics-port=9102" in made.worker_command(1)


@pytest.mark.parametrize(
    ("host", "arguments", "expected"),
    [
        ("127.0.0.1", (), METRICS_PORT),
        ("localhost", ("--grant-key=x",), METRICS_PORT),
        ("::1", (), METRICS_PORT),
        ("0.0.0.0", ("--grant-key=x",), -1),
        ("node-7", (), -1),
        ("0.0.0.0", ("--allow-anonymous",), METRICS_PORT),
        ("0.0.0.0", ("--metrics-token-file=/tokens",), METRICS_PORT),
    ],
)
def test_metrics_are_served_where_workers_may_serve_them(host: str, arguments: tuple[str, ...], expected: int) -> None:
    assert metrics_port(None, host, arguments) == expected
    assert metrics_port(7, host, arguments) == 7, "what is asked for is passed on"


@pytest.mark.parametrize(
    ("port", "said"),
    [
        (65_535, "port 65536 of metrics is out of range; allowed: 1 to 65535"),
        (50_060, "port 50061 is also one of the workers' for metrics, 50060 to 50061"),
        (50_051, "port 50051 is also one of the workers' for metrics, 50051 to 50052"),
    ],
)
def test_ports_of_metrics_that_make_no_sense_are_one_line(port: int, said: str) -> None:
    with pytest.raises(LaunchError) as caught:
        dataclasses.replace(plan(), metrics_port=port).metrics_ports()
    assert str(caught.value) == said


async def test_a_taken_port_of_metrics_is_one_line_that_names_the_flag() -> None:
    with socket.socket() as one, socket.socket() as two, socket.socket() as taken:
        for probe in (one, two, taken):
            probe.bind(("127.0.0.1", 0))
        ports = [probe.getsockname()[1] for probe in (one, two, taken)]
        one.close()
        two.close()
        taken.listen()
        made = dataclasses.replace(plan(port=ports[0], worker_port=ports[1], workers=1), metrics_port=ports[2])
        with pytest.raises(LaunchError) as caught:
            await Cluster(made).run(asyncio.Event())
    assert str(caught.value) == (
        f"port {ports[2]} on 127.0.0.1 is taken (Address already in use): is a cluster running already? "
        "--metrics-port chooses others, -1 none"
    )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (plan(port=70_000), "port 70000 is out of range; allowed: 1 to 65535"),
        (plan(port=0), "port 0 is out of range; allowed: 1 to 65535"),
        (plan(worker_port=65_535), "port 65536 is out of range; allowed: 1 to 65535"),
        (plan(port=50_062), "port 50062 is the router's and also one of the workers' 50061 to 50062"),
    ],
)
def test_ports_that_make_no_sense_are_one_line(wrong: ClusterPlan, said: str) -> None:
    with pytest.raises(LaunchError) as caught:
        wrong.ports()
    assert str(caught.value) == said


def test_a_taken_port_is_told_from_one_that_cannot_be_used() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(LaunchError, match=r"is taken .* is a cluster running already"):
            check_port("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(LaunchError, match=r"port 50051 on 192\.0\.2\.1 cannot be used: ") as caught:
        check_port("192.0.2.1", 50051)  # an address reserved for documentation
    assert "taken" not in str(caught.value)


async def test_a_missing_console_script_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "script", lambda name: f"/nowhere/{name}")
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        ports = one.getsockname()[1], two.getsockname()[1]
    with pytest.raises(LaunchError) as caught:
        await Cluster(plan(port=ports[0], worker_port=ports[1], workers=1)).run(asyncio.Event())
    assert str(caught.value) == "worker-0 cannot be started: /nowhere/trunkline-worker: No such file or directory"


async def test_a_restart_that_the_system_refuses_is_reported_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tries, slept, made = 0, [], object()

    async def start(name: str, command: list[str], *_: object) -> object:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise OSError(12, "Cannot allocate memory")
        return made

    async def sleep(delay_s: float) -> None:
        slept.append(delay_s)

    monkeypatch.setattr(Child, "start", start)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    assert await launcher.start_again("worker-0", ["x"], Backoff(Random(0))) is made
    assert len(slept) == 2
    assert slept[0] < slept[1]
    assert capsys.readouterr().err.count("worker-0 cannot be started: Cannot allocate memory") == 2


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_a_child_that_ignores_sigterm_is_killed_with_its_grandchildren(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(launcher, "STOP_S", 0.2)
    stubborn = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    inner = tmp_path / "inner.py"
    inner.write_text(stubborn + "print(os.getpid(), flush=True)\ntime.sleep(600)\n")
    outer = tmp_path / "outer.py"
    outer.write_text(stubborn + f"import subprocess, sys\nsubprocess.run([sys.executable, {str(inner)!r}])\n")
    child = await Child.start("worker-0", [sys.executable, str(outer)])
    await asyncio.to_thread(wait_until, lambda: bool(child.last_lines), "it and what it started run")
    grandchild = int(child.last_lines[-1])
    try:
        assert alive({grandchild})
        cluster = Cluster(plan())
        cluster._children["worker-0"] = child
        await cluster._stop_all()
        assert describe_status(await child.wait()) == "killed by SIGKILL"
        await asyncio.to_thread(wait_until, lambda: not alive({grandchild}), "the grandchild is gone")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(grandchild, signal.SIGKILL)  # a failing test must not leave this process running


async def test_a_childs_lines_are_relayed_under_its_name_and_its_last_is_kept(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = "import sys; print('one'); print('the reason', file=sys.stderr); sys.exit(2)"
    child = await Child.start("router", [sys.executable, "-u", "-c", code])
    assert describe_status(await child.wait()) == "exit status 2"
    assert child.last_lines[-1] == "the reason"
    assert "[router] one\n[router] the reason\n" in capsys.readouterr().err
