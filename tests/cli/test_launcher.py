"""The command and the launcher: start, use, second start, death of a worker, stop."""

import os
import re
import signal
import subprocess
from pathlib import Path
from random import Random
from urllib.request import urlopen

import pytest

from tests.cluster.processes import Process, alive, descendants, script, wait_until
from tests.worker.engine_rig import DEMO_MODEL
from trunkline_bench.servers.ports import free_port
from trunkline_cli.backoff import FIRST_DELAY_S, HEALTHY_AFTER_S, MOST_DELAY_S, Backoff
from trunkline_cli.launcher import STOP_S, find_model
from trunkline_cli.main import served_name
from trunkline_cli.plan import LaunchError


def serve(*arguments: str) -> tuple[Process, int]:
    port, worker_port = free_port(), free_port()
    process = Process(
        script("trunkline"), "serve", f"--model={DEMO_MODEL}", f"--port={port}", f"--worker-port={worker_port}",
        "--workers=1", "--threads=1", *arguments,
    )  # fmt: skip
    return process, port


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def metrics_at(port: int) -> str:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text: bytes = answer.read()
    return text.decode()


def test_serve_prints_a_command_that_works_and_stops_without_leaving_a_process() -> None:
    http_port, metrics_port = free_port(), free_port()
    of_servers = ("--kv-blocks=64", "--max-stored-responses", "10")  # one flag of the workers and one of the router
    process, port = serve(*of_servers, f"--http-port={http_port}", f"--metrics-port={metrics_port}")
    try:
        printed = process.wait_for(r"generate \"Once upon a time\" --stream")
        words = re.findall(r'"[^"]*"|\S+', printed)
        command = [script("trunkline"), *(word.strip('"') for word in words[1:]), "--max-tokens=8"]
        answer = run(*command)
        assert answer.returncode == 0, answer.stderr
        assert answer.stdout.startswith("Once upon a time")
        models = run(script("trunkline"), "models", f"--server=127.0.0.1:{port}")
        assert "tiny-tales\tcontext 1024\tworkers 1" in models.stdout
        as_json = run(script("trunkline"), "generate", "Hi", "--json", "--max-tokens=3", f"--server=127.0.0.1:{port}")
        assert '"usage"' in as_json.stdout.splitlines()[-1]
        of_router = metrics_at(http_port)
        assert "trunkline_router_requests_total{" in of_router
        assert set(re.findall(r'worker="([^"]*)"', of_router)) == {"worker-0"}, "as in deploy/observability"
        assert "vllm:generation_tokens_total{" in metrics_at(metrics_port)
        chat = run(script("trunkline"), "generate", "Hello!", "--chat", "--max-tokens=5", f"--server=127.0.0.1:{port}")
        assert chat.returncode == 0
        # The answer must outlast `head`: a sampled one may end before `head` does.
        flags = f"--stream --max-tokens 500 --ignore-eos --server=127.0.0.1:{port}"
        pipe = f"{script('trunkline')} generate Once {flags} | head -c 9"
        enough = run("bash", "-c", f"set -o pipefail; {pipe}")
        assert (enough.returncode, enough.stderr) == (128 + signal.SIGPIPE, "")
        wrong = run(script("trunkline"), "generate", "x", "--temperature=nan", f"--server=127.0.0.1:{port}")
        assert wrong.returncode == 1
        assert wrong.stderr == "trunkline generate: sampling.temperature: nan is not in [0, 100]\n"
        second = run(script("trunkline"), "serve", f"--model={DEMO_MODEL}", f"--port={port}")
        assert second.returncode == 1
        assert len(second.stderr.splitlines()) == 1
        assert f"port {port} on 127.0.0.1 is taken" in second.stderr
        family = descendants(process.popen.pid)
        assert len(family) >= 4, "launcher, router, worker, engine"
        process.popen.send_signal(signal.SIGINT)
        assert process.wait() == 0
        assert STOP_S < 5.0, "what still runs then is killed"
        assert not alive(family)
    finally:
        process.stop()


def test_a_worker_that_dies_comes_back_and_kill_9_of_the_launcher_leaves_nothing_behind() -> None:
    process, _ = serve("--kv-blocks=64")
    try:
        process.wait_for("Serving tiny-tales")
        (engine,) = (pid for pid in descendants(process.popen.pid) if is_engine(pid))
        os.kill(engine, signal.SIGKILL)
        line = process.wait_for(r"worker-0 died")
        assert "exit status 1" in line
        assert "the engine process died" in line
        process.wait_for(r"worker-0 is ready again on 127\.0\.0\.1:")
        family = descendants(process.popen.pid)
        assert len(family) >= 4, "launcher, router, worker, engine"
        process.popen.kill()
        wait_until(lambda: not alive(family), "all are gone", timeout_s=60)
    finally:
        process.stop()


@pytest.mark.slow
def test_a_worker_that_was_told_to_stop_has_stopped_and_not_died() -> None:
    process, _ = serve("--kv-blocks=64")
    try:
        process.wait_for("Serving tiny-tales")
        (engine,) = (pid for pid in descendants(process.popen.pid) if is_engine(pid))
        os.kill(parent_of(engine), signal.SIGTERM)
        process.wait_for(r"trunkline: worker-0 stopped \(exit status 0\); starting it again in")
        process.wait_for(r"worker-0 is ready again on")
        assert not any("died" in line for line in process.lines)
    finally:
        process.stop()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_engine(pid: int) -> bool:
    return b"engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_a_model_that_cannot_be_served_is_one_line_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    (tmp_path / "tokenizer.json").write_bytes((DEMO_MODEL / "tokenizer.json").read_bytes())
    port, worker_port = free_port(), free_port()
    process = Process(
        script("trunkline"),
        "serve",
        f"--model={tmp_path}",
        f"--port={port}",
        f"--worker-port={worker_port}",
        "--workers=1",
    )
    assert process.wait(60) == 1
    assert "architecture MambaForCausalLM is not supported" in process.lines[-1]
    assert process.lines[-1].startswith("trunkline serve: worker-0 did not start:")
    process.stop()


def test_a_model_that_is_nowhere_or_a_file_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"there is no model directory \./nowhere"):
        find_model("./nowhere")
    file = tmp_path / "model.bin"
    file.touch()
    with pytest.raises(LaunchError, match=r"model\.bin is a file: a model is a GGUF file, or a directory with"):
        find_model(str(file))
    file = file.rename(tmp_path / "model.gguf")
    assert find_model(str(file)) == file
    assert served_name("", str(file)) == "model"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(LaunchError, match="could not be downloaded") as caught:
        find_model("no-owner/no-model")
    assert len(str(caught.value).splitlines()) == 1


def test_backoff_grows_is_capped_and_starts_over_after_a_healthy_life() -> None:
    backoff = Backoff(Random(0))
    delays = [backoff.after_death(lived_s=1.0) for _ in range(12)]
    for n, delay in enumerate(delays):
        full = min(MOST_DELAY_S, FIRST_DELAY_S * 2**n)
        assert 0.75 * full <= delay <= full
    assert backoff.after_death(lived_s=HEALTHY_AFTER_S) <= FIRST_DELAY_S
