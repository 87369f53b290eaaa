"""One trace per request over client, router and workers, a closing line in the log of each, and content in neither."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import format_span_id, format_trace_id

from tests.cluster.processes import Cluster, running_cluster, wait_until
from tests.runtime.otlp_receiver import GENERATE, GRANT, Receiver, Trace, receiving
from tests.worker.engine_rig import DEMO_MODEL
from trunkline import Client
from trunkline.v1.fleet_pb2 import GetRequestRequest
from trunkline.v1.fleet_pb2_grpc import FleetServiceStub
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.inference_pb2 import GenerateRequest
from trunkline.v1.inference_pb2_grpc import InferenceServiceStub
from trunkline.v1.worker_pb2 import GetStatsRequest

QUEUED_S = 0.02  # a request waits for a place for longer, and is then cancelled
SECRET = "The xylophone of the secretive walrus"
GRANT_KEY = "a key of the tests, 32 bytes or so"
# So few blocks, admitted without foresight, that long answers preempt each other.
FLAGS = ("--dtype=float32", "--deterministic", "--kv-blocks=24", "--admission=optimistic")
WORKER_SPANS = ("worker.generate", "queue", "prefill", ("decode", "detokenize"))
PLAIN = (GENERATE, "tokenize", "admission", "route", ("attempt", WORKER_SPANS))


@dataclass
class TracedCluster:
    cluster: Cluster
    receiver: Receiver

    def line(self, request_id: str, event: str = "request ended") -> dict[str, Any]:
        """A line about a request in the router's log."""

        def found() -> list[dict[str, Any]]:
            about = [line for line in self.cluster.router.lines if f'"{request_id}"' in line and f'"{event}"' in line]
            return [json.loads(line) for line in about]

        wait_until(lambda: bool(found()), f"a line {event!r} about {request_id}")
        return found()[0]


@pytest.fixture(scope="module")
def traced() -> Iterator[TracedCluster]:
    with receiving() as receiver:
        environment = receiver.environment() | {"TRUNKLINE_GRANT_KEY": GRANT_KEY}
        with running_cluster(DEMO_MODEL, *FLAGS, environment=environment) as cluster:
            yield TracedCluster(cluster, receiver)


def has_worker(trace: Trace) -> bool:
    return bool(trace.named("worker.generate"))


async def test_spans_join_from_the_client_to_the_workers_steps(traced: TracedCluster) -> None:
    with TracerProvider().get_tracer("test").start_as_current_span("client") as span:
        context = span.get_span_context()
        async with Client(traced.cluster.address, tenant="acme") as client:
            done = await client.complete(SECRET, max_tokens=6, request_id="trace-me", ignore_eos=True)
    trace = traced.receiver.wait("trace-me", has_worker)
    assert trace.tree() == PLAIN
    assert trace.root.proto.trace_id.hex() == format_trace_id(context.trace_id)
    assert trace.root.parent_id == format_span_id(context.span_id)
    assert (trace.root.service, trace.one("decode").service) == ("trunkline-router", "trunkline-worker")
    assert trace.root.attributes["trunkline.outcome"] == "length"
    assert trace.one("worker.generate").attributes["trunkline.output_tokens"] == 6
    candidates = [candidate for name, candidate in trace.one("route").events if name == "candidate"]
    assert {candidate["worker_id"] for candidate in candidates} == {w.address for w in traced.cluster.workers}
    line = traced.line("trace-me")
    assert line["trace_id"] == format_trace_id(context.trace_id)
    assert (line["tenant"], line["worker"]) == ("acme", done.prompt.worker_id)
    assert line["completion_tokens"] == 6
    named = ("tokenize_ms", "admission_ms", "route_ms", "queue_ms", "first_token_ms", "duration_ms", "device_ms")
    assert all(line[name] >= 0 for name in named)
    assert line["queue_ms"] <= line["first_token_ms"] <= line["duration_ms"]
    assert sum(line["prefill_tokens"]) + line["cached_tokens"] == line["prompt_tokens"]
    assert len(line["prefill_ms"]) == len(line["prefill_tokens"])
    assert (line["router"], line["worker"]) == (trace.root.instance, trace.one("worker.generate").instance)
    assert all(json.loads(each)["router"] == line["router"] for each in traced.cluster.router.lines)
    everything = "\n".join(traced.cluster.router.lines)
    for worker in traced.cluster.workers:
        everything += "\n".join(worker.process.lines)
    assert "xylophone" not in everything
    assert done.text.strip() not in everything
    assert b"xylophone" not in traced.receiver.raw


async def test_a_direct_answer_is_in_the_trace_of_its_grant(traced: TracedCluster) -> None:
    async with Client(traced.cluster.address, direct=True) as client:
        await client.complete("Once upon a time", max_tokens=4, request_id="direct")
    trace = traced.receiver.wait("direct", has_worker)
    assert trace.tree() == (GRANT, *PLAIN[1:])
    assert traced.line("direct")["grants"] == 1


@pytest.mark.slow
async def test_a_preempted_answer_says_how_often_and_what_was_computed_again(traced: TracedCluster) -> None:
    names = [f"long-{number}" for number in range(8)]
    async with Client(traced.cluster.address) as client:
        prompts = (f"Story number {number}" for number in range(8))
        await asyncio.gather(
            *(
                client.complete(prompt, max_tokens=150, request_id=name, ignore_eos=True)
                for prompt, name in zip(prompts, names, strict=True)
            )
        )
    traces = {name: traced.receiver.wait(name, has_worker) for name in names}
    preempted = {name: t for name, t in traces.items() if t.one("decode").attributes["trunkline.preemptions"]}
    assert preempted
    for name, trace in preempted.items():
        assert trace.tree() == PLAIN
        line, decode = traced.line(name), trace.one("decode").attributes
        assert line["preemptions"] == decode["trunkline.preemptions"]
        assert line["recomputed_tokens"] == decode["trunkline.recomputed_tokens"] > 0


@pytest.mark.slow
@pytest.mark.slow
async def test_a_request_that_is_cancelled_in_the_queue_of_its_worker_says_so(traced: TracedCluster) -> None:
    """In its trace, in the log and on the page: it waited for a place, and computed nothing."""
    with running_cluster(
        DEMO_MODEL, "--max-running-requests=1", workers=1, environment=traced.receiver.environment()
    ) as cluster:
        async with grpc.aio.insecure_channel(cluster.address) as channel:
            stub: Any = InferenceServiceStub(channel)
            fleet: Any = FleetServiceStub(channel)
            running = stub.Generate(GenerateRequest(text="Once", sampling=SamplingParams(ignore_eos=True)))
            while not (await running.read()).chunks:
                pass
            queued = stub.Generate(GenerateRequest(text="upon", request_id="queued"))
            began_s = now_s = 0.0  # of the wait, on the worker's clock
            while now_s < began_s + QUEUED_S or not began_s:
                stats = await asyncio.to_thread(cluster.workers[0].stub.GetStats, GetStatsRequest())
                now_s = stats.uptime_s
                began_s = began_s or (now_s if stats.load.waiting else 0.0)
            queued.cancel()
            line = TracedCluster(cluster, traced.receiver).line("queued")
            told = await fleet.GetRequest(GetRequestRequest(request_id="queued"))
            running.cancel()
    trace = traced.receiver.wait("queued", has_worker)
    assert trace.tree() == (*PLAIN[:4], ("attempt", ("worker.generate", "queue")))
    root = trace.root.attributes
    assert (root["trunkline.outcome"], root["rpc.response.status_code"]) == ("cancelled", "CANCELLED")
    assert root["trunkline.queue_cause"] == "queue"
    assert root["trunkline.cause"] == told.summary.cause
    assert trace.one("worker.generate").attributes["trunkline.outcome"] == "cancelled"
    queue = trace.one("queue").proto
    assert queue.end_time_unix_nano - queue.start_time_unix_nano > QUEUED_S * 1e9
    assert line["outcome"] == "cancelled"
    assert line["queue_ms"] >= QUEUED_S * 1e3
    assert "first_token_ms" not in line


async def test_an_answer_that_survives_its_worker_is_one_trace(traced: TracedCluster) -> None:
    """The last test: it leaves one worker."""
    sampling = SamplingParams(max_tokens=200, ignore_eos=True)
    request = GenerateRequest(text="The last story", request_id="survivor", sampling=sampling)
    async with grpc.aio.insecure_channel(traced.cluster.address) as channel:
        stub: Any = InferenceServiceStub(channel)
        async for response in stub.Generate(request):
            if response.HasField("prompt"):
                killed = traced.cluster.worker(response.prompt.worker_id)
                os.killpg(killed.process.popen.pid, signal.SIGKILL)
    trace = traced.receiver.wait("survivor", has_worker)
    assert trace.tree() == (*PLAIN[:4], "attempt", "route", ("attempt", WORKER_SPANS))
    lost, following = trace.named("attempt")
    assert lost.attributes["trunkline.worker"] == killed.address
    assert following.links == [lost.id]
    assert trace.one("worker.generate").links == [lost.id], "the worker links the attempt that it continues"
    assert trace.root.attributes["trunkline.kept"] == ["sampled", "resumed"]
    (failover,) = traced.line("survivor")["failovers"]
    assert failover["worker"] == killed.address
    assert failover["silence_ms"] > 0
    warning = traced.line("survivor", "continuing on another worker")
    assert (warning["worker"], warning["trace_id"]) == (killed.address, trace.root.proto.trace_id.hex())
