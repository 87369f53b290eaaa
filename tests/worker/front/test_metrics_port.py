"""A front's metrics over HTTP, and the rule for ports that others can reach."""

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.metrics_page import documented, told
from tests.worker.front.front_rig import MODEL
from tests.worker.front.timed_front import TimedFront
from trunkline_runtime.settings import parse_settings
from trunkline_runtime.telemetry.scrape_tokens import ScrapeTokens
from trunkline_worker.front.metrics_port import metrics_served
from trunkline_worker.front.session import Backlog
from trunkline_worker.front.telemetry.worker_metrics import WorkerMetrics
from trunkline_worker.front_settings import WorkerSettings


async def scrape(port: int) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    body = (await reader.read()).partition(b"\r\n\r\n")[2].decode()
    writer.close()
    return body


def sums(text: str) -> dict[str, float]:
    """Of each family's samples."""
    return {
        family.name: sum(sample.value for sample in family.samples) for family in text_string_to_metric_families(text)
    }


async def test_choices_of_a_front_are_in_its_metrics() -> None:
    metrics = WorkerMetrics(MODEL)
    async with metrics_served("worker-0", "127.0.0.1", 0, metrics, Backlog(), ScrapeTokens([]), None) as server:
        assert server is not None
        timed = TimedFront(metrics=metrics)
        for n in range(4):
            timed.step(5 + n, finish=n == 3)
        text = await scrape(server.port)
    found = sums(text)
    assert found["vllm:request_success"] == 1
    assert found["vllm:generation_tokens"] == 4
    assert found["trunkline_worker_tenant_choices"] == 1
    assert found["trunkline_worker_outbox_bytes"] == 0
    assert "trunkline_worker_event_loop_lag_seconds" in found
    assert told(text) == documented("worker")


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ([], None),
        (["--metrics-port=9101"], None),
        (["--metrics-port=9101", "--host=::1"], None),
        (["--metrics-port=9101", "--host=0.0.0.0"], "--metrics-token-file"),
        (["--metrics-port=0", "--host=10.0.0.7"], "--metrics-token-file"),
        (["--metrics-port=9101", "--host=0.0.0.0", "--metrics-token-file=/tokens"], None),
        (["--metrics-port=9101", "--host=0.0.0.0", "--metrics-anonymous"], None),
        (["--host=0.0.0.0"], None),
        (["--metrics-port=50061"], "the worker's port"),
    ],
)
def test_no_port_of_metrics_is_open_to_others_unless_that_was_asked_for(flags: list[str], problem: str | None) -> None:
    flags = ["--model=/absent", "--allow-plaintext", f"--grant-key={'k' * 32}", *flags]
    found = parse_settings(WorkerSettings, flags, {}, prog="trunkline-worker").problem()
    assert (found is None) == (problem is None)
    assert (problem or "") in (found or "")
