"""Workers and one router that serves HTTP, as processes."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trunkline_bench.servers.ports import free_port

START_S = 300.0
STOP_S = 30.0
SHOWN_LINES = 5


@contextmanager
def process(command: Sequence[str], environment: dict[str, str], log: Path) -> Iterator[None]:
    """Runs a server whose output goes to a file."""
    with log.open("wb") as output:
        running = subprocess.Popen(command, env=os.environ | environment, stdout=output, stderr=output)
        try:
            yield
        finally:
            running.terminate()
            try:
                running.wait(STOP_S)
            except subprocess.TimeoutExpired:
                running.kill()
                running.wait()


@dataclass(frozen=True, slots=True)
class Served:
    """A worker of a stack. flags: its settings beside its model, name and port"""

    model: Path
    flags: Sequence[str] = ()


@contextmanager
def http_stacks(models: dict[str, Served], logs: Path) -> Iterator[str]:
    """A router with the default settings before one worker for each model. Yields the URL.

    models: by the name under which each is served; logs: folder for router.log and the workers' logs
    """
    module, addresses = (sys.executable, "-m"), []
    with ExitStack() as stack:
        for name, served in models.items():
            port = free_port()
            addresses.append(f"127.0.0.1:{port}")
            flags = (f"--model={served.model}", f"--served-model-name={name}", f"--port={port}", *served.flags)
            log = logs / f"worker-{len(addresses)}.log"
            stack.enter_context(process([*module, "trunkline_worker.main", *flags], {}, log))
        port, http_port = free_port(), free_port()
        ports = (f"--workers={','.join(addresses)}", f"--port={port}", f"--http-port={http_port}")
        stack.enter_context(process([*module, "trunkline_router.main", *ports], {}, logs / "router.log"))
        yield f"http://127.0.0.1:{http_port}"


def http_stack(model: Path, name: str, logs: Path, worker_flags: Sequence[str] = ()) -> AbstractContextManager[str]:
    """http_stacks() with one worker."""
    return http_stacks({name: Served(model, worker_flags)}, logs)


def wait_for_completion(url: str, model: str) -> None:
    """Waits until a completion succeeds. Raises TimeoutError after START_S."""
    wait_for_answer(f"{url}/v1/completions", {"model": model, "prompt": "a", "max_tokens": 1})


def wait_for_answer(endpoint: str, body: dict[str, Any]) -> None:
    """Waits until a request succeeds. Raises TimeoutError after START_S."""
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        request = urllib.request.Request(endpoint, json.dumps(body).encode(), {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60.0):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(1.0)
    raise TimeoutError(f"{endpoint} does not answer")


def log_ends(logs: Path) -> str:
    """The last lines of each log in a folder."""
    return "\n".join(
        f"{log.name}:\n" + "\n".join(log.read_text(errors="replace").splitlines()[-SHOWN_LINES:])
        for log in sorted(logs.glob("*.log"))
    )
