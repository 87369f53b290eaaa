"""A launcher whose output cannot be written serves on, restarts its processes, and stops them when asked."""

import fcntl
import os
import signal
from pathlib import Path

import pytest

from tests.broken_logs import PIPE_BYTES, start
from tests.cluster.processes import alive, descendants, script, wait_until
from tests.worker.engine_rig import DEMO_MODEL
from trunkline.client.sync_client import SyncClient
from trunkline.errors import TrunklineError
from trunkline_bench.servers.ports import free_port

STOP_S = 60.0  # for failures only
REQUESTS = 40  # their lines fill the pipe


@pytest.mark.slow
@pytest.mark.parametrize("is_closed", [False, True], ids=["stalled reader", "broken pipe"])
def test_a_launcher_outlives_its_output(is_closed: bool) -> None:
    port = free_port()
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    launcher = start(
        script("trunkline"), "serve", f"--model={DEMO_MODEL}", f"--port={port}", f"--worker-port={free_port()}",
        "--http-port=-1", "--workers=1", "--threads=1", "--kv-blocks=64", stdout=writer, stderr=writer,
    )  # fmt: skip
    os.close(writer)
    try:
        with os.fdopen(reader) as output:
            # What dies before is a process that did not start, and ends the launcher.
            assert any("Serving " in line for line in output)
            if is_closed:
                output.close()
            generate(port, REQUESTS)
            family = descendants(launcher.pid)
            (engine,) = (pid for pid in family if b"engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes())
            os.kill(engine, signal.SIGKILL)
            wait_until(lambda: not alive({engine}), "the engine is gone")
            generate(port, 1)
            family |= descendants(launcher.pid)
            launcher.send_signal(signal.SIGTERM)
            assert launcher.wait(STOP_S) == 0
            assert not alive(family)
    finally:
        launcher.kill()
        launcher.wait()


def generate(port: int, count: int) -> None:
    """Sends requests, each once the cluster is ready."""
    with SyncClient(f"127.0.0.1:{port}", retries=0) as client:
        for _ in range(count):
            wait_until(lambda: is_answered(client), "a request is answered")


def is_answered(client: SyncClient) -> bool:
    try:
        return client.complete("Once", max_tokens=1).usage.completion_tokens == 1
    except TrunklineError:  # not ready
        return False
