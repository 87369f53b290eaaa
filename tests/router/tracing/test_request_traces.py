"""The traces of requests, as a real receiver gets them: one tree per request, whatever became of it."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest

from tests.router import direct_rig
from tests.router.cluster import PATIENCE_S, cluster, refusal, until
from tests.router.direct_rig import KEY, direct
from tests.router.failover_rig import DIED, PROMPT, fakes, first_of, rest
from tests.router.fake_worker import FakeWorker
from tests.runtime.otlp_receiver import GENERATE, GRANT, GRPC, HTTP, Receiver, receiving
from trunkline.status import CODE_INTERNAL, INTERNAL, RequestRefused
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.inference_pb2 import GenerateRequest
from trunkline.v1.worker_pb2 import Gap, PrefillChunk, SampledStep, Timeline
from trunkline_router.access.access import Tenant, Tenants
from trunkline_router.edge.http_call import Edge
from trunkline_router.observe.recent.recent_requests import RecordRing
from trunkline_router.observe.tracing.request_traces import TRACE_LIMITS, RequestTraces, TraceLimits, why_kept
from trunkline_router.quotas.quota import Quotas
from trunkline_router.record.rate_limits import BudgetLimits
from trunkline_router.record.refused_calls import RefusedCall
from trunkline_router.record.request_observer import RequestObserver
from trunkline_router.record.request_record import AttemptRecord, RequestRecord
from trunkline_router.request.failover import FailoverLimits
from trunkline_runtime.telemetry import genai
from trunkline_runtime.tracing import open_tracing

TRACE_ID, CALLER_SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE_ID}-{CALLER_SPAN_ID}-01"
SECRET = "the unspeakable prompt"
NEVER_SLOW_S = 1000.0
TIMELINE = Timeline(
    admitted_s=0.0001,
    first_token_s=0.0003,
    ended_s=0.0005,
    device_s=0.0002,
    decode_steps=2,
    chunks=[PrefillChunk(started_s=0.0001, duration_s=0.0001, tokens=20, step_prefill_tokens=30, step_sequences=2)],
    gaps=[Gap(at_s=0.0004, duration_s=0.0001)],
    num_gaps=1,
    detokenize_s=0.0001,
    sampled_steps=[SampledStep(at_s=0.00035, duration_s=0.0001, decode_tokens=7, sequences=7)],
)

WAITED_S = 0.25  # longer than a busy machine delays a request on its way to the worker


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with receiving() as started:
        yield started


@contextmanager
def traced(
    receiver: Receiver,
    protocol: str = GRPC,
    *,
    sampler: str = "parentbased_always_on",
    slow_s: float = NEVER_SLOW_S,
    limits: TraceLimits = TRACE_LIMITS,
) -> Iterator[RequestObserver]:
    """An observer that exports to the receiver.  limits: how many requests at most"""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (receiver.environment(protocol) | {"OTEL_TRACES_SAMPLER": sampler}).items():
            patch.setenv(name, value)
        patch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
        tracing = open_tracing("trunkline-router", "router-1")
    assert tracing.queue is not None
    traces = RequestTraces(tracing.queue, slow_s, limits=limits)
    yield RequestObserver(tracing.sampler, [traces.request_ended], traces.may_export)
    tracing.queue.close()


async def test_an_answer_is_one_tree_over_either_protocol(receiver: Receiver) -> None:
    for protocol in (GRPC, HTTP):
        with traced(receiver, protocol) as observer:
            async with cluster(FakeWorker("a"), FakeWorker("b"), observer=observer) as router:
                await router.answer(PROMPT, request_id=f"plain-{protocol[:4]}", sampling=SamplingParams(max_tokens=3))
        trace = receiver.wait(f"plain-{protocol[:4]}")
        assert trace.tree() == (GENERATE, "tokenize", "admission", "route", "attempt"), protocol
        assert protocol in receiver.protocols
    attributes = trace.root.attributes
    expected = {
        "rpc.system.name": "grpc",
        "rpc.method": "trunkline.v1.InferenceService/Generate",
        "rpc.response.status_code": "OK",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "trunkline",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 3,
        "gen_ai.usage.input_tokens": len(PROMPT),
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ["length"],
        "trunkline.kept": ["sampled"],
    }
    assert {name: attributes.get(name) for name in expected} == expected
    assert trace.root.name == attributes["rpc.method"], "the conventions' name"
    assert attributes["gen_ai.response.time_to_first_chunk"] > 0
    assert "gen_ai.request.seed" not in attributes, "the client gave none"
    assert "trunkline.device_s" not in attributes, "the worker said nothing of it"
    assert trace.root.proto.kind == trace.root.proto.SPAN_KIND_SERVER
    assert trace.one("attempt").proto.kind == trace.root.proto.SPAN_KIND_CLIENT
    assert [name for name, _ in trace.one("route").events] == ["candidate", "candidate"]
    assert not trace.root.is_error


async def test_a_slow_request_that_was_not_sampled_has_its_workers_spans_all_the_same(receiver: Receiver) -> None:
    worker = FakeWorker("a", answer=None)
    with traced(receiver, sampler="always_off", slow_s=0.0) as observer:
        async with cluster(worker, observer=observer) as router:
            call = router.generate(PROMPT, request_id="slow")
            choice = await worker.arrived.get()
            await asyncio.sleep(TIMELINE.ended_s)  # so long the answer takes by the timeline
            choice.tokens(3, finish=True, timeline=TIMELINE)
            _ = [response async for response in call]
    trace = receiver.wait("slow")
    assert worker.submits[0].traceparent.endswith("-00"), "the worker exports nothing"
    inside = ("worker.generate", "queue", "prefill", ("decode", "detokenize"))
    assert trace.tree() == (GENERATE, "tokenize", "admission", "route", ("attempt", inside))
    assert trace.root.attributes["trunkline.kept"] == ["slow"]
    assert trace.root.attributes["trunkline.device_s"] == pytest.approx(TIMELINE.device_s)
    ((name, chunk),) = trace.one("prefill").events
    assert (name, chunk["trunkline.tokens"], chunk["trunkline.step.prefill_tokens"]) == ("chunk", 20, 30)
    decode = trace.one("decode")
    assert decode.attributes["trunkline.decode_steps"] == 2
    assert decode.attributes["trunkline.detokenize_s"] == TIMELINE.detokenize_s
    assert trace.one("detokenize").attributes["trunkline.aggregated"] is True
    assert [name for name, _ in decode.events] == ["step", "gap"]
    assert decode.events[0][1]["trunkline.step.decode_tokens"] == 7
    attempt, generated = trace.one("attempt").proto, trace.one("worker.generate").proto
    assert attempt.start_time_unix_nano <= generated.start_time_unix_nano
    assert generated.end_time_unix_nano <= attempt.end_time_unix_nano


async def test_a_resumed_answer_links_its_attempts_and_is_always_exported(receiver: Receiver) -> None:
    workers = fakes("a", "b")
    with traced(receiver, sampler="always_off") as observer:
        async with cluster(*workers, observer=observer) as router:
            call = router.generate(PROMPT, request_id="resumed")
            first = await first_of(workers)
            first.tokens(2)
            await call.read()
            first.fail(DIED)
            second = await first_of(workers)
            second.tokens(2, finish=True)
            await rest(call)
    trace = receiver.wait("resumed")
    assert trace.tree() == (GENERATE, "tokenize", "admission", "route", "attempt", "route", "attempt")
    lost, following = trace.named("attempt")
    assert following.links == [lost.id]
    assert lost.is_error
    assert lost.attributes["trunkline.ended"] == "NO_WORKER"
    assert following.attributes["trunkline.resumed_at_tokens"] == 2
    assert second.submit.resume.traceparent == first.submit.traceparent
    assert second.submit.traceparent.split("-")[2] == following.id
    (failover,) = [event for name, event in trace.root.events if name == "failover"]
    assert failover["trunkline.worker"] == first.worker.worker_id
    assert failover["trunkline.next_worker"] == second.worker.worker_id
    assert failover["trunkline.problem"] == DIED.message
    assert failover["trunkline.silence_s"] > 0
    assert trace.root.attributes["trunkline.kept"] == ["resumed"]


async def test_refusals_and_cancels_say_how_far_they_came(receiver: Receiver) -> None:
    worker = FakeWorker("a", answer=None)
    tenants = Tenants({"poor": Tenant(quotas=Quotas(tokens_in_flight=5))})
    with traced(receiver) as observer:
        async with cluster(worker, observer=observer, tenants=tenants) as router:
            await refusal(router.generate(PROMPT, request_id="invalid", n=0))
            metadata = (("x-trunkline-tenant", "poor"),)
            request = GenerateRequest(text="much too much", request_id="refused")
            await refusal(router.stub.Generate(request, metadata=metadata))
            call = router.generate(PROMPT, request_id="cancelled")
            await worker.arrived.get()
            call.cancel()
            await until(lambda: worker.num_running == 0)
    invalid, refused, cancelled = (receiver.wait(name) for name in ("invalid", "refused", "cancelled"))
    assert invalid.tree() == GENERATE
    assert invalid.root.attributes["rpc.response.status_code"] == "INVALID_ARGUMENT"
    assert invalid.root.attributes["error.type"] == "INVALID_ARGUMENT"
    assert not invalid.root.is_error, "it is the client's"
    assert refused.root.attributes["trunkline.outcome"] == "QUOTA_EXCEEDED"
    assert refused.root.attributes["trunkline.tenant"] == "poor"
    assert cancelled.tree() == (GENERATE, "tokenize", "admission", "route", "attempt")
    assert cancelled.root.attributes["rpc.response.status_code"] == "CANCELLED"
    assert cancelled.one("attempt").attributes["trunkline.ended"] == "cancelled"


async def test_an_unsampled_callers_request_is_exported_if_it_fails_and_only_then(receiver: Receiver) -> None:
    worker = FakeWorker("a", answer=None)
    metadata = (("traceparent", f"00-{TRACE_ID}-{CALLER_SPAN_ID}-00"),)
    with traced(receiver) as observer:
        async with cluster(worker, observer=observer, failover=FailoverLimits(max_resumptions=0)) as router:
            for request_id in ("fine", "failed"):
                call = router.stub.Generate(GenerateRequest(text="x", request_id=request_id), metadata=metadata)
                choice = await worker.arrived.get()
                if request_id == "fine":
                    choice.tokens(1, finish=True)
                    _ = [response async for response in call]
                else:
                    choice.fail(DIED)
                    await refusal(call)
    trace = receiver.wait("failed")
    assert receiver.trace("fine") is None
    assert trace.root.proto.trace_id.hex() == TRACE_ID
    assert trace.root.parent_id == CALLER_SPAN_ID
    assert trace.root.attributes["trunkline.kept"] == ["failed"]
    assert trace.root.attributes["rpc.response.status_code"] == "UNAVAILABLE"
    assert trace.root.is_error


async def test_a_request_over_http_has_its_attributes(receiver: Receiver) -> None:
    with traced(receiver) as observer:
        async with cluster(FakeWorker("a", answer=2), observer=observer, edge=Edge) as router:
            address = f"http://127.0.0.1:{router.http_port}"
            async with httpx2.AsyncClient(base_url=address, timeout=PATIENCE_S, trust_env=False) as http:
                extras: dict[str, dict[str, Any]] = {
                    "http": {"stream": True},
                    "http-refused": {"max_tokens": 1 << 20},
                }
                for request_id, extra in extras.items():
                    body = {"model": "tiny", "messages": [{"role": "user", "content": SECRET}], **extra}
                    headers = {"x-request-id": request_id, "traceparent": f"00-{TRACE_ID}-{CALLER_SPAN_ID}-01"}
                    await http.post("/v1/chat/completions", json=body, headers=headers)
    trace = receiver.wait("http")
    attributes = trace.root.attributes
    expected = {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "url.path": "/v1/chat/completions",
        "url.scheme": "http",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.request.stream": True,
    }
    assert {name: attributes.get(name) for name in expected} == expected
    assert trace.root.name == "POST /v1/chat/completions"
    assert trace.root.parent_id == CALLER_SPAN_ID
    refused = receiver.trace("http-refused")
    assert refused is not None
    assert refused.root.attributes["http.response.status_code"] == 400
    assert refused.root.attributes["error.type"] == "CONTEXT_LENGTH_EXCEEDED"
    assert not refused.root.is_error, "it is the client's"


async def test_all_prompts_of_one_call_are_in_one_trace(receiver: Receiver) -> None:
    with traced(receiver) as observer:
        async with cluster(FakeWorker("a", answer=2), observer=observer, edge=Edge) as router:
            address = f"http://127.0.0.1:{router.http_port}"
            async with httpx2.AsyncClient(base_url=address, timeout=PATIENCE_S, trust_env=False) as http:
                body = {"model": "tiny", "prompt": ["one", "two"]}
                await http.post("/v1/completions", json=body, headers={"x-request-id": "two-prompts"})
    trace = receiver.wait("two-prompts-0", lambda trace: len(trace.named("POST /v1/completions")) == 2)
    assert trace.root.attributes["gen_ai.operation.name"] == "text_completion"


async def test_all_prompts_of_one_call_are_sampled_or_none_whoever_chose_the_trace(receiver: Receiver) -> None:
    """Also with a sampler that does not follow callers."""
    worker = FakeWorker("a", answer=2)
    with traced(receiver, sampler="traceidratio") as observer:
        async with cluster(worker, observer=observer, edge=Edge) as router:
            address = f"http://127.0.0.1:{router.http_port}"
            async with httpx2.AsyncClient(base_url=address, timeout=PATIENCE_S, trust_env=False) as http:
                body = {"model": "tiny", "prompt": ["one", "two", "three"]}
                for number in range(1, 41):
                    traceparent = f"00-{number:032x}-{CALLER_SPAN_ID}-01"
                    await http.post("/v1/completions", json=body, headers={"traceparent": traceparent})
                    await http.post("/v1/completions", json=body)
    flags: dict[str, list[str]] = {}
    for submit in worker.submits:
        _, trace_id, _, flag = submit.traceparent.split("-")
        flags.setdefault(trace_id, []).append(flag)
    assert len(flags) == 80
    assert {tuple(each) for each in flags.values()} == {("00",) * 3, ("01",) * 3}


async def test_workers_do_not_export_what_the_router_has_no_room_for(receiver: Receiver) -> None:
    """Whether there is room is known before a worker is told the flag."""
    worker = FakeWorker("a", answer=1)
    one = BudgetLimits(per_s=1e-6, at_once=1.0, reserve=0.0, account_per_s=0.0, account_at_once=0.0)
    with traced(receiver, limits=TraceLimits(sampled=one, others=one, refused=one)) as observer:
        async with cluster(worker, observer=observer) as router:
            for request_id in ("first", "second"):
                await router.answer(PROMPT, request_id=request_id)
    receiver.wait("first")
    assert [submit.traceparent[-2:] for submit in worker.submits] == ["01", "00"]
    assert receiver.trace("second") is None


class Exports:
    """Counts what it is given."""

    num_put = num_withheld = 0

    def put(self, _: object) -> bool:
        self.num_put += 1
        return True

    def withhold(self) -> None:
        self.num_withheld += 1


class Flood:
    """Requests that end at `now_s`, and what is exported of them."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.exports = Exports()
        self.traces = RequestTraces(self.exports, slow_s=None, clock_s=lambda: self.now_s)

    def is_exported(self, tenant: str, outcome: str, *, is_sampled: bool = False) -> bool:
        """Whether a request that ends now is exported."""
        record = RequestRecord("an id", self.now_s, 0, tenant=tenant, ended_s=self.now_s, outcome=outcome)
        record.is_sampled = is_sampled and self.traces.may_export(record)
        self.traces.request_ended(record)
        return record.is_exported


def test_a_flood_of_requests_that_their_clients_sample_is_withheld_and_counted() -> None:
    """Those that begin as sampled, and those that are worth a look, which have room of their own."""
    sampled, others = TRACE_LIMITS.sampled, TRACE_LIMITS.others
    for outcome, budgets in (("length", [sampled]), ("NO_WORKER", [sampled, others])):
        flood = Flood()
        num_exported = sum(flood.is_exported("", outcome, is_sampled=True) for _ in range(1000))
        assert sum(each.at_once - each.reserve for each in budgets) <= num_exported
        assert num_exported < sum(each.at_once for each in budgets)
        assert (flood.exports.num_put, flood.exports.num_withheld) == (num_exported, 1000 - num_exported)


def test_sampled_requests_never_use_up_the_room_of_failed_ones() -> None:
    flood, exported = Flood(), Counter[str]()
    for number in range(30 * 300):
        flood.now_s += 1 / 300
        exported["sampled"] += flood.is_exported(f"tenant-{number % 8}", "length", is_sampled=True)
        if number % 300 == 7:
            exported["failed"] += flood.is_exported("quiet", "NO_WORKER")
            exported["failed and sampled"] += flood.is_exported("quiet", "NO_WORKER", is_sampled=True)
    assert exported["failed"] == exported["failed and sampled"] == 30
    assert 0.9 * 30 * TRACE_LIMITS.sampled.per_s < exported["sampled"], "the rest is for them"


def test_refused_calls_take_nothing_of_what_requests_have() -> None:
    """Each of them comes from another address of 200 IPv6 networks, or of one."""
    for num_networks in (200, 1):
        flood, num_exported = Flood(), 0
        for number in range(30 * 250):
            flood.now_s += 1 / 250
            host = f"2001:db8:0:{number % num_networks:x}::{number:x}"
            flood.traces.call_refused(RefusedCall("http", "UNAUTHENTICATED", 401, host=host, traceparent=TRACEPARENT))
            if number % 250 == 0:
                num_exported += flood.is_exported("quiet", "NO_WORKER")
        assert num_exported == 30
        refused = TRACE_LIMITS.refused
        assert flood.exports.num_put - num_exported <= 30 * refused.per_s + refused.at_once
        assert len(flood.traces._refused._shares) <= num_networks


async def test_the_root_span_says_what_the_request_waited_for_in_its_worker(receiver: Receiver) -> None:
    """And so does the page, when what the router weighed has been forgotten."""
    worker = FakeWorker("a", answer=None)
    # The router shortens a wait that exceeds the attempt to the whole attempt: the time on the way does not matter.
    waited = Timeline(admitted_s=60.0, first_token_s=60.0, ended_s=60.0, chunks=TIMELINE.chunks)
    pools = {"kv_pressure": (9_990, 10), "queue": (100, 9_900)}
    load: dict[str, Any] = {"running": 20, "running_kv_tokens": 160_000, "waiting": 4, "waiting_by_lane": [0, 4, 0]}
    load["retry_delay_ms_by_lane"] = [50, 9_000, 9_000]
    ring = RecordRing(len(pools))
    with traced(receiver) as observer:
        observer._listeners = (*observer._listeners, Told(ring).request_ended)
        async with cluster(worker, observer=observer) as router:
            connected = router.connected(0)
            for cause, (live, free) in pools.items():
                worker.send_load(**load, kv_live_blocks=live, kv_free_blocks=free)
                await until(lambda live=live: connected.load.kv_live_blocks == live)  # type: ignore[misc]
                call = router.generate(PROMPT, request_id=cause, sampling=SamplingParams(seed=7))
                choice = await worker.arrived.get()
                await asyncio.sleep(WAITED_S)
                choice.tokens(1, finish=True, timeline=waited)
                _ = [response async for response in call]
    for cause in pools:
        attributes = receiver.wait(cause).root.attributes
        assert (attributes["trunkline.queue_cause"], attributes["trunkline.cause"]) == (cause, cause)
        assert attributes["gen_ai.request.seed"] == 7
    assert [told.cause for told in ring.newest_first()] == [*reversed(pools)]
    assert all(told.record.placements[0].plan is None for told in ring.newest_first())


@pytest.mark.parametrize("protocol", [GRPC, HTTP])
async def test_without_a_collector_requests_are_answered(monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    nowhere = Receiver(ports=dict.fromkeys((GRPC, HTTP), 1))
    with traced(nowhere, protocol) as observer:
        async with cluster(FakeWorker("a"), observer=observer) as router:
            for _ in range(20):
                assert await router.answer(PROMPT)


async def test_a_grant_is_an_attempt_whose_span_the_workers_is_a_child_of(receiver: Receiver) -> None:
    workers = direct_rig.fakes("a", "b", answer=3)
    with traced(receiver) as observer:
        async with cluster(*workers, observer=observer, grant_key=KEY) as router, direct(router) as client:
            await client.complete(PROMPT, request_id="granted")
    trace = receiver.wait("granted")
    assert trace.tree() == (GRANT, "tokenize", "admission", "route", "attempt")
    (submit,) = (submit for worker in workers for submit in worker.submits)
    assert submit.traceparent.split("-")[2] == trace.one("attempt").id
    assert trace.root.attributes["trunkline.grants"] == 1
    assert trace.root.attributes["rpc.method"] == "trunkline.v1.InferenceService/Grant"


async def test_spans_hold_no_text_and_no_token(receiver: Receiver) -> None:
    """Of a request with all that a client can write, and all that a worker can say."""
    worker = FakeWorker("a", answer=None)
    with traced(receiver) as observer:
        async with cluster(worker, observer=observer, failover=FailoverLimits(max_resumptions=0)) as router:
            sampling = SamplingParams(stop=[SECRET], temperature=0.5)
            call = router.generate(SECRET, request_id="secret", sampling=sampling, cache_salt=SECRET)
            choice = await worker.arrived.get()
            choice.tokens(1, text=SECRET)
            choice.fail(RequestRefused(CODE_INTERNAL, INTERNAL, SECRET))
            await refusal(call)
    trace = receiver.wait("secret")
    assert trace.root.attributes["gen_ai.request.temperature"] == pytest.approx(0.5)
    assert SECRET.encode() not in receiver.raw


async def test_old_spellings_and_vllms_latencies_are_opted_into(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(genai, "_opted_in", lambda: frozenset({genai.BOTH, genai.VLLM}))
    worker = FakeWorker("a", answer=None)
    with traced(receiver) as observer:
        async with cluster(worker, observer=observer) as router:
            call = router.generate(PROMPT, request_id="opted")
            choice = await worker.arrived.get()
            await asyncio.sleep(TIMELINE.ended_s)
            choice.tokens(3, finish=True, timeline=TIMELINE)
            _ = [response async for response in call]
    attributes = receiver.wait("opted").root.attributes
    assert attributes["gen_ai.usage.prompt_tokens"] == attributes["gen_ai.usage.input_tokens"] == len(PROMPT)
    assert attributes["gen_ai.latency.time_in_queue"] == pytest.approx(TIMELINE.admitted_s)
    prefill_s = TIMELINE.first_token_s - TIMELINE.admitted_s
    assert attributes["gen_ai.latency.time_in_model_prefill"] == pytest.approx(prefill_s)
    assert attributes["gen_ai.latency.e2e"] >= attributes["gen_ai.latency.time_to_first_token"] > 0


class Told:
    """Puts the records into a ring."""

    def __init__(self, ring: RecordRing) -> None:
        self._ring = ring

    def request_ended(self, record: RequestRecord) -> None:
        self._ring.add(record)


def record(**fields: Any) -> RequestRecord:
    return RequestRecord("r", 0.0, 0, ended_s=100.0, first_token_s=0.5, **fields)


def attempts(*, gap_s: float = 0.0, silence_s: float = 0.0) -> list[AttemptRecord]:
    first = AttemptRecord("a", 0.0, first_output_s=0.5, last_output_s=1.0, timelines=[Timeline(longest_gap_s=gap_s)])
    return [first, AttemptRecord("b", 1.0, first_output_s=1.0 + silence_s)]


@pytest.mark.parametrize(
    ("ended", "why"),
    [
        (record(), []),
        (record(is_sampled=True), ["sampled"]),
        (record(stalled_s=90.0), []),
        (RequestRecord("r", 0.0, 0, ended_s=9.0, first_token_s=3.0), ["slow"]),
        (RequestRecord("r", 0.0, 0, ended_s=3.0), ["slow"]),
        (record(attempts=attempts(gap_s=3.0)), ["slow"]),
        (record(attempts=attempts(silence_s=3.0)), ["slow"]),
        (record(outcome="NO_WORKER", is_sampled=True), ["sampled", "failed"]),
        (record(outcome="QUOTA_EXCEEDED"), []),
        (record(outcome="OVERLOADED"), ["failed"]),
        (record(outcome="OVERLOADED", fell_behind=True), []),
        (record(attempts=[AttemptRecord("a", 0.0, resumed_at_tokens=0)]), ["resumed"]),
    ],
)
def test_what_is_slow_failed_or_resumed_is_kept(ended: RequestRecord, why: list[str]) -> None:
    assert why_kept(ended, slow_s=2.0) == why
    assert "slow" not in why_kept(ended, slow_s=None)
