"""`trunkline serve` with API keys from the environment becomes ready and serves; open to strangers it never starts."""

import asyncio
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.cluster.processes import START_S, Process, alive, descendants, script
from tests.router.identity import key_rig
from tests.worker.engine_rig import DEMO_MODEL
from trunkline_bench.servers.ports import free_port
from trunkline_cli.launcher import wait_until_serving
from trunkline_cli.passed_flags import PassedFlags
from trunkline_cli.plan import ClusterPlan
from trunkline_router.access.keys.new_key import new_key
from trunkline_router.main import router_settings

KEYS = "TRUNKLINE_API_KEYS"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_serve_with_keys_becomes_ready_and_serves_those_that_have_one(tmp_path: Path) -> None:
    key, file = new_key(), tmp_path / "key"
    key_rig.write(tmp_path / "keys.json", key_rig.record(key))
    file.write_text(key.credential)
    port, http_port = free_port(), free_port()
    process = Process(
        script("trunkline"), "serve", f"--model={DEMO_MODEL}", f"--port={port}", f"--http-port={http_port}",
        f"--worker-port={free_port()}", "--workers=1", "--threads=1", "--kv-blocks=64", "--verbose",
        environment={KEYS: str(tmp_path / "keys.json")},
    )  # fmt: skip
    try:
        printed = process.wait_for(r"generate \"Once upon a time\" --stream")
        assert printed.endswith(f"--server 127.0.0.1:{port} --api-key-file FILE")
        asked = (script("trunkline"), "generate", "Hi", "--max-tokens=3", f"--server=127.0.0.1:{port}")
        answer = run(*asked, f"--api-key-file={file}")
        assert (answer.returncode, answer.stderr) == (0, "")
        refused = run(*asked)
        assert refused.returncode == 1
        assert len(refused.stderr.splitlines()) == 1
        models = f"http://127.0.0.1:{http_port}/v1/models"
        headers = {"Authorization": f"Bearer {key.credential}"}
        with urllib.request.urlopen(urllib.request.Request(models, headers=headers), timeout=60) as response:
            assert b"tiny-tales" in response.read()
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(models, timeout=60)
        with urllib.request.urlopen(f"http://127.0.0.1:{http_port}/ready", timeout=60) as response:
            assert response.status == 200
        family = descendants(process.popen.pid)
        assert len(family) >= 4, "launcher, router, worker, engine"
        process.popen.terminate()
        assert process.wait() == 0
        assert not alive(family)
    finally:
        process.stop()
    assert key.secret not in "\n".join(process.lines)


async def test_the_launcher_does_not_wait_for_a_readiness_that_it_may_not_ask_for(tmp_path: Path) -> None:
    """As with --open=metrics, which replaces the launcher's --open=readiness."""
    key_rig.write(tmp_path / "keys.json", key_rig.record(new_key()))
    port = free_port()
    flags = (f"--api-keys={tmp_path / 'keys.json'}", f"--port={port}", "--http-port=-1", "--open=metrics")
    router = Process(script("trunkline-router"), f"--workers=127.0.0.1:{free_port()}", *flags)
    try:
        async with asyncio.timeout(START_S):
            await wait_until_serving(f"127.0.0.1:{port}")
    finally:
        router.stop()


def test_the_launchers_router_does_not_start_open_to_strangers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = ClusterPlan(DEMO_MODEL, "m", 1, "0.0.0.0", 50051, 50061, PassedFlags.of(["--allow-plaintext"]))
    arguments = plan.router_command()[1:]
    monkeypatch.delenv(KEYS, raising=False)
    with pytest.raises(SystemExit) as caught:
        router_settings(arguments)
    assert caught.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith("trunkline-router: --host=0.0.0.0 can be reached from other machines")
    assert printed.count("\n") == 1
    monkeypatch.setenv(KEYS, str(tmp_path / "keys.json"))
    assert router_settings(arguments).identity.api_keys, "with keys it may"


def test_serve_on_all_addresses_says_in_one_line_why_it_does_not_start() -> None:
    serve = ("serve", f"--model={DEMO_MODEL}", "--host=0.0.0.0", f"--port={free_port()}", "--http-port=-1")
    ended = run(script("trunkline"), *serve, f"--worker-port={free_port()}", "--workers=1")
    assert ended.returncode == 1
    said = [line for line in ended.stderr.splitlines() if line.startswith("trunkline serve:")]
    assert len(said) == 1
    assert "--host=0.0.0.0 can be reached from" in said[0]  # by the router or the worker, whichever says it first
