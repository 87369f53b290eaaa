"""Calls that are refused before they become requests: a line in the log, a count, and a span if the client traces."""

import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.resources import Resource
from structlog.testing import capture_logs

from tests.router.cluster import Cluster, cluster, refusal, until
from tests.router.fake_worker import FakeWorker
from tests.router.http.http_rig import connected, get
from tests.runtime.otlp_receiver import GENERATE, ReceivedSpan, Receiver, read, receiving
from trunkline.names import TENANT_KEY
from trunkline.status import unauthenticated
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.inference_pb2 import GenerateRequest
from trunkline_router.access.access import UNCHECKED, Access
from trunkline_router.access.gate.places import Bounds, Places
from trunkline_router.access.gate.request_size import MAX_FIELDS, MAX_REQUEST_BYTES
from trunkline_router.access.identity.identity import Identity, Role
from trunkline_router.edge.http_call import Edge
from trunkline_router.observe.tracing.request_traces import TRACE_LIMITS, RequestTraces
from trunkline_router.record.rate_limits import BudgetLimits
from trunkline_router.record.refused_calls import LINE_LIMITS, RefusedCalls
from trunkline_runtime.telemetry.span_queue import SpanQueue, Spans
from trunkline_runtime.tracing import open_tracing

SECRET = "the unspeakable prompt"
KEY, SCRAPER_KEY = "the right key", "the scraper's key"
CALLER_SPAN_ID = "00f067aa0ba902b7"
CHAT, MODELS = "/v1/chat/completions", "/v1/models"


class TwoKeys:
    """Knows two credentials: one may do everything, the other one is a scraper's."""

    def identify(self, credential: str, host: str = "") -> Identity:
        if credential == SCRAPER_KEY:
            return Identity("key:2", "acme", frozenset({Role.SCRAPER}))
        if credential != KEY:
            raise unauthenticated("not a key of this router")
        return UNCHECKED


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with receiving() as started:
        yield started


@asynccontextmanager
async def router_of(
    receiver: Receiver, *, traces: BudgetLimits = TRACE_LIMITS.refused, lines: BudgetLimits = LINE_LIMITS
) -> AsyncIterator[tuple[Cluster, SpanQueue]]:
    """A router that demands a key, and exports to the receiver.  traces, lines: how many at most"""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in receiver.environment().items():
            patch.setenv(name, value)
        tracing = open_tracing("trunkline-router", "router-1")
    assert tracing.queue is not None
    limits = replace(TRACE_LIMITS, refused=traces)
    listener = RequestTraces(tracing.queue, None, limits=limits, sampler=tracing.sampler)
    refused = RefusedCalls(listener.call_refused, limits=lines)
    access = Access(identify=TwoKeys().identify)
    async with cluster(FakeWorker("a"), access=access, expected=(True,), edge=Edge, refused=refused) as router:
        yield router, tracing.queue
    tracing.queue.close()


def sent(method: str, path: str, number: int, body: bytes = b"", *headers: str, key: str = KEY) -> bytes:
    """A request of a client that traces it."""
    head = [f"{method} {path} HTTP/1.1", "Host: localhost", f"traceparent: {traceparent(number)}", *headers]
    if key:
        head.append(f"Authorization: Bearer {key}")
    if body:
        head += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*head, "", ""]).encode() + body


def traceparent(number: int, flags: str = "01") -> str:
    return f"00-{number:032x}-{CALLER_SPAN_ID}-{flags}"


def span_of(receiver: Receiver, number: int) -> ReceivedSpan:
    """The only span of a trace."""

    def found() -> list[ReceivedSpan]:
        return [span for span in receiver.spans if int(span.proto.trace_id.hex(), 16) == number]

    with receiver.arrived:
        assert receiver.arrived.wait_for(found, timeout=60), number
    (span,) = found()
    return span


@dataclass(frozen=True)
class Refused:
    """A call, and what is told of it."""

    sent: bytes
    status: int
    reason: str
    name: str  # of its span
    method: str = "POST"
    route: str = CHAT
    field: str = ""  # as in the log


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "messages": [{"role": "user", "content": SECRET}], **fields}).encode()


UNREAD = chat(wishes=SECRET)
CALLS = {
    "bad JSON": Refused(
        sent("POST", CHAT, 1, b'{"' + SECRET.encode()), 400, "INVALID_REQUEST", "POST /v1/chat/completions",
        field="body",
    ),
    "unknown field": Refused(sent("POST", CHAT, 2, UNREAD), 400, "INVALID_REQUEST", "POST /v1/chat/completions"),
    "no credentials": Refused(
        sent("POST", CHAT, 3, UNREAD, key=""), 401, "UNAUTHENTICATED", "POST /v1/chat/completions"
    ),
    "wrong credentials": Refused(
        sent("POST", CHAT, 4, UNREAD, key=SECRET), 401, "UNAUTHENTICATED", "POST /v1/chat/completions"
    ),
    "another scheme": Refused(
        sent("POST", CHAT, 5, UNREAD, "Authorization: Basic abc", key=""), 401, "UNAUTHENTICATED",
        "POST /v1/chat/completions",
    ),
    "body too large": Refused(
        sent("POST", CHAT, 6, b"", f"Content-Length: {MAX_REQUEST_BYTES + 1}"), 413, "request_too_large",
        "POST /v1/chat/completions",
    ),
    "wrong method": Refused(
        sent("DELETE", CHAT, 7), 405, "method_not_allowed", "DELETE /v1/chat/completions", method="DELETE"
    ),
    "wrong path": Refused(
        sent("POST", f"/v1{CHAT}?q={SECRET.split()[1]}", 8, UNREAD), 404, "not_found", "POST", route=""
    ),
    "unknown response": Refused(
        sent("GET", "/v1/models/none", 9), 404, "MODEL_NOT_FOUND", "GET /v1/models/{model:path}", method="GET",
        route="/v1/models/{model:path}", field="model",
    ),
    "own method": Refused(
        sent("PURGE", CHAT, 10), 405, "method_not_allowed", "HTTP /v1/chat/completions", method="PURGE"
    ),
    "unserved field": Refused(
        sent("POST", CHAT, 11, chat(response_format={SECRET: 1})), 400, "INVALID_REQUEST",
        "POST /v1/chat/completions", field="response_format.type",
    ),
    "wrong type in a message": Refused(
        sent("POST", CHAT, 12, chat(messages=[{"role": 1}])), 400, "INVALID_REQUEST", "POST /v1/chat/completions",
        field="messages[0].role",
    ),
    "unknown field of a message": Refused(
        sent("POST", CHAT, 13, chat(messages=[{"role": "user", "content": "x", "unspeakable": 1}])), 400,
        "INVALID_REQUEST", "POST /v1/chat/completions", field="messages[0]",
    ),
    "unknown field that looks like a known one": Refused(
        sent("POST", CHAT, 14, chat(**{"model[unspeakable].x": 1})), 400, "INVALID_REQUEST",
        "POST /v1/chat/completions",
    ),
    "own key of an object": Refused(
        sent("POST", CHAT, 15, chat(logit_bias={"unspeakable": "x"})), 400, "INVALID_REQUEST",
        "POST /v1/chat/completions", field="logit_bias",
    ),
}  # fmt: skip


async def test_each_refused_call_has_a_line_a_count_and_a_span(receiver: Receiver) -> None:
    async with router_of(receiver) as (router, _):
        with capture_logs() as logs:
            answers = {name: await answer(router, call.sent) for name, call in CALLS.items()}
        counts = router.gate.refused.counts
    lines = [line for line in logs if line["event"] == "call refused"]
    for number, ((name, call), line) in enumerate(zip(CALLS.items(), lines, strict=True), 1):
        status, headers = answers[name]
        assert status == line["status"] == call.status, name
        assert (line["reason"], line.get("route", "")) == (call.reason, call.route), name
        assert line.get("field", "") == call.field, name
        assert line.get("method", "PURGE") == call.method, name
        assert line["request_id"] == headers["x-request-id"], name
        assert (line["trace_id"], line["client"]) == (f"{number:032x}", "127.0.0.1"), name
        span = span_of(receiver, number)
        assert (span.name, span.parent_id, span.is_routers) == (call.name, CALLER_SPAN_ID, True), name
        expected = {
            "trunkline.request_id": headers["x-request-id"],
            "trunkline.kept": ["sampled"],
            "http.request.method": "_OTHER" if call.method == "PURGE" else call.method,
            "http.response.status_code": call.status,
            "error.type": call.reason,
            "url.scheme": "http",
        }
        assert {each: span.attributes.get(each) for each in expected} == expected, name
        assert span.attributes.get("http.route", "") == call.route, name
        assert not span.is_error, "it is the client's"
    assert "url.path" not in span_of(receiver, 8).attributes, "the path is a client's own words"
    assert not any("path" in line for line in lines)
    assert "PURGE" not in str(logs)
    assert counts["http", "UNAUTHENTICATED"] == 3
    assert counts["http", "request_too_large"] == 1
    assert counts.total() == len(CALLS)
    assert "unspeakable" not in str(logs)
    assert b"unspeakable" not in receiver.raw


async def answer(router: Cluster, request: bytes) -> tuple[int, dict[str, str]]:
    assert router.http is not None
    async with connected(router.http) as client:
        client.send(request)
        status, headers, _ = await client.response()
    return status, headers


async def test_only_a_call_that_its_client_samples_has_a_span(receiver: Receiver) -> None:
    async with router_of(receiver) as (router, _):
        sampled = sent("GET", "/nowhere", 101)
        await answer(router, sampled.replace(b"-01\r\n", b"-00\r\n"))
        await answer(router, get("/nowhere"))
        await answer(router, sampled.replace(f"{101:032x}".encode(), f"{102:032x}".encode()))
    assert span_of(receiver, 102).name == "GET"
    assert not [span for span in receiver.spans if int(span.proto.trace_id.hex(), 16) == 101]


async def test_a_call_over_grpc_that_the_gate_refuses_is_told_of_too(receiver: Receiver) -> None:
    async with router_of(receiver) as (router, _):
        with capture_logs() as logs:
            refused = await refusal(
                router.stub.Generate(GenerateRequest(text=SECRET), metadata=(("traceparent", traceparent(201)),))
            )
        assert refused.code is grpc.StatusCode.UNAUTHENTICATED
        assert router.gate.refused.counts == {("grpc", "UNAUTHENTICATED"): 1}
    (line,) = [line for line in logs if line["event"] == "call refused"]
    assert (line["route"], line["reason"], line["trace_id"]) == (GENERATE, "UNAUTHENTICATED", f"{201:032x}")
    span = span_of(receiver, 201)
    assert span.name == span.attributes["rpc.method"] == GENERATE
    assert span.attributes["rpc.response.status_code"] == span.attributes["error.type"] == "UNAUTHENTICATED"


async def test_the_line_and_the_span_of_a_refused_call_have_the_tenant_of_its_credentials(receiver: Receiver) -> None:
    full = Places(Bounds(in_all=9, of_host=9, of_connection=9, of_tenant=0), "open requests")
    async with router_of(receiver) as (router, _):
        router.gate.requests = full
        with capture_logs() as logs:
            for number, (key, *named) in enumerate(((SCRAPER_KEY,), (KEY, (TENANT_KEY, "initech"))), 301):
                metadata = (("traceparent", traceparent(number)), ("authorization", f"Bearer {key}"), *named)
                await refusal(router.stub.Generate(GenerateRequest(text=SECRET), metadata=metadata))
            assert (await answer(router, sent("POST", CHAT, 303, UNREAD, key=SCRAPER_KEY)))[0] == 403
    lines = [line for line in logs if line["event"] == "call refused"]
    expected = [("FORBIDDEN", "acme"), ("OVERLOADED", "initech"), ("FORBIDDEN", "acme")]
    assert [(line["reason"], line["tenant"]) for line in lines] == expected
    spans = [span_of(receiver, number).attributes for number in (301, 302, 303)]
    assert [(span["trunkline.outcome"], span["trunkline.tenant"]) for span in spans] == expected


async def test_the_span_of_a_call_over_grpc_begins_when_the_call_arrives(receiver: Receiver) -> None:
    """One call sends a message with too many fields for any request, another one is given up before it sends any."""
    few = Places(Bounds(in_all=9, of_host=2, of_connection=9, of_tenant=9), "open requests")
    async with router_of(receiver) as (router, _), lone_channel(router) as one, lone_channel(router) as other:
        router.gate.requests = few
        calls = []
        for number in (401, 402):
            calls.append(opened(one, number))
            await until(lambda: few.num_held == len(calls))
        opened_ns = time.time_ns()
        third = opened(other, 403)
        assert await calls[0].code() is grpc.StatusCode.RESOURCE_EXHAUSTED, "it is given up"
        await calls[1].write(GenerateRequest(sampling=SamplingParams(stop=[""] * (MAX_FIELDS + 1))).SerializeToString())
        assert await calls[1].code() is grpc.StatusCode.INVALID_ARGUMENT
        assert router.gate.refused.counts == {("grpc", "OVERLOADED"): 1, ("grpc", "INVALID_REQUEST"): 1}
        third.cancel()
    for number in (401, 402):
        span = span_of(receiver, number)
        assert span.proto.start_time_unix_nano < opened_ns < span.proto.end_time_unix_nano
        assert span.attributes["trunkline.tenant"] == "initech"


def lone_channel(router: Cluster) -> grpc.aio.Channel:
    """With a connection of its own."""
    return grpc.aio.insecure_channel(f"127.0.0.1:{router.port}", options=(("grpc.use_local_subchannel_pool", 1),))


def opened(channel: grpc.aio.Channel, number: int) -> Any:
    """A call that has not sent its message yet."""
    metadata = {"traceparent": traceparent(number), "authorization": f"Bearer {KEY}", TENANT_KEY: "initech"}
    return channel.stream_stream(f"/{GENERATE}")(metadata=tuple(metadata.items()))


async def test_a_flood_of_refused_calls_costs_counts_and_a_bounded_number_of_lines_and_spans(
    receiver: Receiver,
) -> None:
    few = BudgetLimits(per_s=0.0, at_once=20.0, reserve=10.0, account_per_s=0.0, account_at_once=2.0)
    flood = 300
    async with router_of(receiver, traces=few, lines=few) as (router, queue):
        with capture_logs() as logs:
            assert router.http is not None
            async with connected(router.http) as client:
                for number in range(flood):
                    client.send(sent("GET", "/nowhere", 1000 + number))
                    assert (await client.response())[0] == 404
            router.gate.refused._lines._all.add(20.0)  # later
            await answer(router, get("/nowhere"))
        assert router.gate.refused.counts == {("http", "not_found"): flood + 1}
        withheld = queue.counts.withheld
    lines = [line for line in logs if line["event"] == "call refused"]
    assert len(lines) == 13, "10, 2 of the reserve, and the one after the flood"
    assert [line.get("unlogged") for line in lines] == [None] * 12 + [flood - 12]
    span_of(receiver, 1000)
    assert sum(int(span.proto.trace_id.hex(), 16) >= 1000 for span in receiver.spans) == 12
    assert withheld == flood - 12


async def test_a_failure_of_the_router_has_a_span_in_any_case() -> None:
    """As for requests. Without a request, only a bug fails so."""
    exported: list[ReceivedSpan] = []

    class Exports:
        def put(self, spans: Spans) -> bool:
            exported.extend(read(spans(Resource.create())))
            return True

        def withhold(self) -> None:
            raise AssertionError

    listener = RequestTraces(Exports(), None)
    async with cluster(FakeWorker("a"), edge=Edge, refused=RefusedCalls(listener.call_refused)) as router:

        async def broken(*_: object) -> None:
            raise RuntimeError(SECRET)

        router.inference.models = broken  # type: ignore[assignment]
        status, headers = await answer(router, get(MODELS))
    (span,) = exported
    assert status == span.attributes["http.response.status_code"] == 500
    assert span.attributes["trunkline.kept"] == ["failed"]
    assert span.attributes["trunkline.request_id"] == headers["x-request-id"]
    assert span.is_error
    assert SECRET not in str(span.proto)
