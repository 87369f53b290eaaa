"""One trace and one log line per request: joined to the caller's trace, with the decision, without any text."""

import json
from collections.abc import Iterator

import pytest
import structlog

from tests.router.api.observed import Traces, ended
from tests.router.cluster import cluster, refusal, until
from tests.router.fake_worker import FakeWorker
from tests.runtime.otlp_receiver import GENERATE
from trunkline.status import CODE_INTERNAL, INTERNAL, RequestRefused
from trunkline.v1.generation_pb2 import Lane
from trunkline.v1.inference_pb2 import GenerateRequest
from trunkline_router.access.access import Tenant, Tenants
from trunkline_router.request.failover import FailoverLimits

TRACE_ID, CALLER_SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE_ID}-{CALLER_SPAN_ID}-01"
SECRET = "the unspeakable prompt"


@pytest.fixture
def traces() -> Traces:
    return Traces()


@pytest.fixture
def lines() -> Iterator[list[dict[str, object]]]:
    """Everything that is logged while the test runs."""
    with structlog.testing.capture_logs() as captured:
        yield captured  # type: ignore[misc]


async def test_the_callers_trace_goes_on_through_the_router_to_the_worker(traces: Traces) -> None:
    worker = FakeWorker("a")
    async with cluster(worker, observer=traces.observer) as router:
        call = router.stub.Generate(
            GenerateRequest(text=SECRET), metadata=(("traceparent", TRACEPARENT), ("tracestate", "vendor=1"))
        )
        _ = [response async for response in call]
    span = traces.one(GENERATE)
    assert span.parent_id == CALLER_SPAN_ID
    _, trace_id, span_id, _ = worker.submits[0].traceparent.split("-")
    assert trace_id == TRACE_ID
    assert span_id == traces.one("attempt").id
    assert worker.submits[0].tracestate == "vendor=1"


async def test_the_span_tells_what_was_weighed_and_what_came_of_it(traces: Traces) -> None:
    a, b = FakeWorker("a"), FakeWorker("b")
    prompt = list(range(10, 74))
    b.cache_prompt(prompt)
    async with cluster(a, b, observer=traces.observer) as router:
        await router.answer([*prompt, 1], request_id="r-1")
    span = traces.one(GENERATE)
    expected = {
        "request_id": "r-1",
        "model": "tiny",
        "worker": "b",
        "prompt_tokens": 65,
        "cached_tokens": 64,
        "completion_tokens": 3,
        "outcome": "length",
    }
    assert {name: span.attributes[f"trunkline.{name}"] for name in expected} == expected
    route = traces.one("route")
    assert route.attributes["trunkline.route.matched_tokens"] == 64
    candidates = [attributes for name, attributes in route.events if name == "candidate"]
    assert [c["worker_id"] for c in candidates] == ["b", "a"], "the better one first"
    assert [c["matched_tokens"] for c in candidates] == [64, 0]
    # Of a fleet that says nothing of its steps a step is taken to last 1 ms, and a token in it 0.1 ms.
    assert [c["prefill_s"] for c in candidates] == pytest.approx([1.1e-3, 7.5e-3])
    assert route.attributes["trunkline.route.policy"] == "predicted-ttft"
    assert route.attributes["trunkline.route.reason"] == (
        "the first token is expected in 1.1 ms, sooner than anywhere else"
    )


async def test_one_line_per_request_tells_its_outcome(lines: list[dict[str, object]]) -> None:
    async with cluster(FakeWorker("a")) as router:
        await router.answer(SECRET, request_id="r-2", n=2)
    line = ended(lines)
    assert (line["request_id"], line["worker"], line["outcome"]) == ("r-2", "a", "length")
    assert (line["prompt_tokens"], line["completion_tokens"], line["choices"]) == (len(SECRET) + 1, 6, 2)


async def test_a_refusal_a_cancel_and_a_lost_worker_are_told_apart(lines: list[dict[str, object]]) -> None:
    worker = FakeWorker("a", answer=None)
    async with cluster(worker, failover=FailoverLimits(max_resumptions=0)) as router:
        await refusal(router.generate([1], n=0, request_id="refused"))
        call = router.generate([1], request_id="cancelled")
        await worker.arrived.get()
        call.cancel()
        await until(lambda: worker.num_running == 0)
        call = router.generate([1], request_id="lost")
        (await worker.arrived.get()).tokens(1)
        await call.read()
        await worker.die()
        await refusal(call)
        await refusal(router.generate([1], request_id="no-worker", model="tiny"))
        await refusal(router.generate([1], request_id="unknown", model="of a client's choice"))
    models = {line["request_id"]: line.get("model") for line in lines if line["event"] == "request ended"}
    assert (models["no-worker"], models["unknown"]) == ("tiny", None), "only a model that a worker has served is named"
    outcomes = {line["request_id"]: line["outcome"] for line in lines if line["event"] == "request ended"}
    assert outcomes == {
        "refused": "INVALID_REQUEST",
        "cancelled": "cancelled",
        "lost": "NO_WORKER",
        "no-worker": "NO_WORKER",
        "unknown": "NO_WORKER",
    }


async def test_neither_logs_nor_spans_hold_text(
    traces: Traces, lines: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = FakeWorker("a", answer=None)
    async with cluster(worker, observer=traces.observer) as router:
        call = router.generate(SECRET)
        (await worker.arrived.get()).tokens(1, text=SECRET, finish=True)
        _ = [response async for response in call]
        await refusal(router.generate(SECRET, n=0))
    spans = [str(span.proto) for span in traces.spans]
    assert spans
    assert lines
    assert "unspeakable" not in json.dumps([*spans, *map(str, lines)])


async def test_tenant_and_lane_stand_in_the_line_and_in_the_span(
    traces: Traces, lines: list[dict[str, object]]
) -> None:
    tenants = Tenants({"acme": Tenant(3.0, Lane.LANE_STANDARD)})
    async with cluster(FakeWorker("a"), tenants=tenants, observer=traces.observer) as router:
        call = router.stub.Generate(
            GenerateRequest(text="x", lane=Lane.LANE_INTERACTIVE), metadata=(("x-trunkline-tenant", "acme"),)
        )
        _ = [response async for response in call]
    attributes = traces.one(GENERATE).attributes
    assert (attributes["trunkline.tenant"], attributes["trunkline.lane"]) == ("acme", "standard")
    assert (ended(lines)["tenant"], ended(lines)["lane"]) == ("acme", "standard")


@pytest.mark.parametrize("bad", ["two words", "x" * 129, "new\nline"])
async def test_a_request_whose_id_cannot_be_used_leaves_a_line_and_a_span_under_a_new_one(
    traces: Traces, lines: list[dict[str, object]], bad: str
) -> None:
    async with cluster(FakeWorker("a"), observer=traces.observer) as router:
        refused = await refusal(router.generate("x", request_id=bad))
    assert (refused.reason, refused.field) == ("INVALID_REQUEST", "request_id")
    line = ended(lines)
    assert line["outcome"] == "INVALID_REQUEST"
    assert line["request_id"] != bad
    assert len(str(line["request_id"])) == 32
    assert (traces.one(GENERATE).attributes)["trunkline.request_id"] == line["request_id"]


async def test_a_workers_internal_error_is_told_with_the_request_id_too(lines: list[dict[str, object]]) -> None:
    worker = FakeWorker("a", answer=None)
    async with cluster(worker) as router:
        call = router.generate("x", request_id="r-18")
        (await worker.arrived.get()).fail(RequestRefused(CODE_INTERNAL, INTERNAL, "block 7 is held twice"))
        refused = await refusal(call)
    assert refused.reason == INTERNAL
    assert "r-18" in refused.message
    assert "block" not in refused.message
    assert ended(lines)["outcome"] == INTERNAL
