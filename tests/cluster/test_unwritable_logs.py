"""A log that cannot be written costs lines, and no request: a router and a worker whose standard errors are broken."""

import json
import signal
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.broken_logs import BROKEN_LOGS, STALLED, start
from tests.cluster.processes import START_S, script, wait_until
from tests.worker.engine_rig import DEMO_MODEL
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.inference_pb2 import GenerateRequest, ListModelsRequest
from trunkline.v1.inference_pb2_grpc import InferenceServiceStub
from trunkline_bench.servers.ports import free_port

REQUESTS = 20  # of each kind: their lines fill the pipe several times
TOKENS = 3


@pytest.mark.parametrize(
    "kind", [STALLED, *(pytest.param(kind, marks=pytest.mark.slow) for kind in BROKEN_LOGS if kind != STALLED)]
)
def test_requests_are_answered_and_lost_lines_counted(kind: str, tmp_path: Path) -> None:
    port, http_port, worker_port, metrics_port = (free_port() for _ in range(4))
    with ExitStack() as stack:
        stderr = stack.enter_context(BROKEN_LOGS[kind](tmp_path))
        worker = start(
            script("trunkline-worker"), f"--model={DEMO_MODEL}", f"--port={worker_port}", "--threads=1", "--device=cpu",
            f"--metrics-port={metrics_port}", "--stats-interval-s=0.02", stderr=stderr,
        )  # fmt: skip
        stack.callback(worker.kill)
        router = start(
            script("trunkline-router"), f"--workers=127.0.0.1:{worker_port}", f"--port={port}",
            f"--http-port={http_port}", stderr=stderr,
        )  # fmt: skip
        stack.callback(router.kill)
        stub: Any = InferenceServiceStub(stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}")))

        def ready() -> bool:
            models = stub.ListModels(ListModelsRequest(), wait_for_ready=True, timeout=START_S).models
            return bool(models)

        wait_until(ready, "the worker is connected")
        sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
        for _ in range(REQUESTS):
            *_, last = stub.Generate(GenerateRequest(text="Once", sampling=sampling), timeout=START_S)
            assert last.usage.completion_tokens == TOKENS
            assert num_completed(http_port) == TOKENS
            assert streamed(http_port)[-1] == "[DONE]"

        if kind != STALLED:  # a pipe that is full leaves a queue of 1 MiB, which test_log_writer.py fills
            assert dropped(http_port, "trunkline_router") > 0
            assert dropped(metrics_port, "trunkline_worker") > 0
        for process in (router, worker):
            process.send_signal(signal.SIGTERM)
            assert process.wait(START_S) == 0


def posted(port: int, *, stream: bool = False) -> str:
    body = {"prompt": "Once", "max_tokens": TOKENS, "ignore_eos": True, "stream": stream}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps({"model": DEMO_MODEL.name, **body}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=START_S) as answer:
        return str(answer.read().decode())


def num_completed(port: int) -> int:
    """How many tokens an answer has."""
    tokens: int = json.loads(posted(port))["usage"]["completion_tokens"]
    return tokens


def streamed(port: int) -> list[str]:
    """The data of all events."""
    lines = posted(port, stream=True).splitlines()
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


def dropped(port: int, server: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=START_S) as answer:
        families = {family.name: family for family in text_string_to_metric_families(answer.read().decode())}
    (sample,) = families[f"{server}_dropped_log_lines"].samples
    return float(sample.value)
