"""One trace from the client's span through router and worker, and logs that never hold a prompt."""

import json

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import format_span_id, format_trace_id

from tests.cluster.processes import running_cluster
from tests.worker.engine_rig import DEMO_MODEL
from trunkline import Client

SECRET = "The xylophone of the secretive walrus"


async def test_spans_join_across_processes_and_no_log_line_holds_the_prompt() -> None:
    tracer = TracerProvider().get_tracer("test")
    with running_cluster(DEMO_MODEL, workers=1, environment={"OTEL_TRACES_EXPORTER": "console"}) as cluster:
        with tracer.start_as_current_span("client") as span:
            context = span.get_span_context()
            async with Client(cluster.address) as client:
                done = await client.complete(SECRET, max_tokens=6, request_id="trace-me", ignore_eos=True)
        (worker,) = cluster.workers
        cluster.router.stop()
        worker.stop()
    printed = cluster.router.lines + worker.process.lines
    spans = [json.loads(text) for process in (cluster.router, worker.process) for text in objects(process.lines)]
    (router_span,) = (s for s in spans if s["name"] == "router.generate")
    (worker_span,) = (s for s in spans if s["name"] == "worker.generate")
    assert router_span["context"]["trace_id"] == worker_span["context"]["trace_id"]
    assert router_span["context"]["trace_id"] == "0x" + format_trace_id(context.trace_id)
    assert router_span["parent_id"] == "0x" + format_span_id(context.span_id)
    assert worker_span["parent_id"] == router_span["context"]["span_id"]
    assert router_span["attributes"]["trunkline.request_id"] == "trace-me"
    assert router_span["attributes"]["trunkline.outcome"] == "length"
    assert router_span["events"][0]["attributes"]["cost_s"] > 0
    assert worker_span["attributes"]["trunkline.output_tokens"] == 6
    ended = [json.loads(line) for line in printed if '"request ended"' in line or '"choice ended"' in line]
    assert {(line["service"], line["request_id"]) for line in ended} == {("router", "trace-me"), ("worker", "trace-me")}
    assert ended[0]["trace_id"] == format_trace_id(context.trace_id)
    everything = "\n".join(printed)
    assert "xylophone" not in everything
    assert done.text.strip() not in everything


def objects(lines: list[str]) -> list[str]:
    """The console exporter's pretty-printed JSON objects among other lines."""
    found: list[str] = []
    current: list[str] | None = None
    for line in lines:
        if line == "{":
            current = []
        if current is not None:
            current.append(line)
        if line == "}" and current is not None:
            found.append("\n".join(current))
            current = None
    return found
