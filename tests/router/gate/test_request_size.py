"""A request larger than any legal one is refused before it is parsed, and other requests do not notice."""

import asyncio
import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.parameters import one_in
from tests.router.cluster import Cluster, Refusal, cluster, refusal, until
from tests.router.fake_worker import FakeWorker
from tests.router.loop_work import watched_loop
from tests.router.tokenizer_files import VOCAB_SIZE
from trunkline.client.client import Client
from trunkline.errors import InvalidRequest
from trunkline.names import TENANT_KEY
from trunkline.status import RequestRefused
from trunkline.v1.fleet_pb2 import ExplainRouteRequest
from trunkline.v1.generation_pb2 import SamplingParams, ToolCall
from trunkline.v1.inference_pb2 import (
    ChatMessage,
    ChatMessages,
    ChatPart,
    DetokenizeRequest,
    GenerateRequest,
    GrantRequest,
    TokenIds,
    TokenizeRequest,
    Tool,
    ToolResult,
)
from trunkline.v1.inference_pb2_grpc import InferenceServiceStub
from trunkline.validation import MAX_LOGIT_BIAS, MAX_STOP_BYTES, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS
from trunkline_router.access.gate import request_gate
from trunkline_router.access.gate.places import BYTE_BOUNDS, Bounds
from trunkline_router.access.gate.request_size import (
    FIELDS_PER_STEP,
    MAX_FIELDS,
    MAX_REQUEST_BYTES,
    MAX_UNKNOWN_BYTES,
    UNSEEN_BYTES,
    check_size,
)
from trunkline_router.prompts.conversation import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS
from trunkline_router.prompts.tokenizer import MAX_CHAT_BYTES, MAX_TEXT_BYTES
from trunkline_router.request.inference import MAX_DETOKENIZED_IDS

SERVICE = "/trunkline.v1.InferenceService/"
GENERATE, GRANT, TOKENIZE, DETOKENIZE = (SERVICE + name for name in ("Generate", "Grant", "Tokenize", "Detokenize"))
EXPLAIN = "/trunkline.v1.FleetService/ExplainRoute"
CONTEXT = 131_072
MIB = 1 << 20
LEAST_STREAMS = 1000  # of an attack: on a quiet machine it opens twenty times as many in a second
MOST_WORK_S = 0.3  # of CPU time: what is refused here held a router up for seconds


def is_taken(method: str, raw: bytes) -> bool:
    """Whether it would be parsed. Nothing but a refusal may come of any bytes."""
    try:
        num_steps(method, raw)
    except RequestRefused:
        return False
    return True


def num_steps(method: str, raw: bytes) -> int:
    """In how many steps of the event loop it is checked. Raises RequestRefused."""
    checking, steps = check_size(method, raw), 1
    with suppress(StopIteration):
        while True:
            checking.send(None)
            steps += 1
    return steps


def full_sampling() -> SamplingParams:
    return SamplingParams(
        temperature=1.0,
        logit_bias={index: 1.5 for index in range(MAX_LOGIT_BIAS)},
        stop=["s" * MAX_STOP_BYTES] * MAX_STOP_STRINGS,
        stop_token_ids=[CONTEXT] * MAX_STOP_TOKEN_IDS,
        seed=2**64 - 1,
    )


LARGEST = {
    "text": GenerateRequest(text="x" * MAX_TEXT_BYTES, sampling=full_sampling()),
    "token ids": GenerateRequest(token_ids=TokenIds(ids=[2**28 - 1] * CONTEXT), sampling=full_sampling()),
    "messages": GenerateRequest(
        chat=ChatMessages(messages=[ChatMessage(role="user", content="c" * 900)] * MAX_MESSAGES),
        sampling=full_sampling(),
        request_id="r" * 128,
        model="m",
    ),
    "parts": GenerateRequest(
        chat=ChatMessages(
            messages=[
                ChatMessage(role="assistant", parts=[ChatPart(tool_call=ToolCall(id="call", name="f", arguments="{}"))])
            ]
            * (MAX_MESSAGES // 2)
            + [ChatMessage(role="tool", parts=[ChatPart(tool_result=ToolResult(call_id="c", name="f", content="r"))])]
            * (MAX_MESSAGES // 2),
            tools=[Tool(name="f", description="d", parameters="{}", strict=True)] * MAX_TOOLS,
        ),
        sampling=full_sampling(),
    ),
    "one message": GenerateRequest(
        chat=ChatMessages(messages=[ChatMessage(role="user", content="é" * (MAX_CHAT_BYTES // 2 - 16))])
    ),
}


@pytest.mark.parametrize("name", LARGEST)
def test_the_largest_legal_requests_are_parsed(name: str) -> None:
    request = LARGEST[name]
    for method, message in (
        (GENERATE, request),
        (GRANT, GrantRequest(request=request)),
        (EXPLAIN, ExplainRouteRequest(request=request)),
    ):
        raw = message.SerializeToString()
        assert UNSEEN_BYTES < len(raw) < MAX_REQUEST_BYTES
        assert num_steps(method, raw) <= 1 + MAX_FIELDS // FIELDS_PER_STEP


@settings(max_examples=20, deadline=None)
@given(st.integers(2 * FIELDS_PER_STEP // 3, MAX_MESSAGES), st.sampled_from((GENERATE, TOKENIZE, EXPLAIN, GRANT)))
def test_others_have_their_turn_while_a_long_conversation_is_checked(messages: int, method: str) -> None:
    chat = ChatMessages(messages=[ChatMessage(role="user", content="c" * 20)] * messages)
    request = GenerateRequest(chat=chat)
    message: Any = {
        GENERATE: request,
        TOKENIZE: TokenizeRequest(chat=chat),
        EXPLAIN: ExplainRouteRequest(request=request),
        GRANT: GrantRequest(request=request),
    }[method]
    assert num_steps(method, message.SerializeToString()) >= 1 + 3 * messages // FIELDS_PER_STEP


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, MAX_MESSAGES),
    st.integers(0, MAX_PARTS),
    st.integers(0, MAX_LOGIT_BIAS),
    st.integers(0, MAX_STOP_STRINGS),
    st.integers(0, CONTEXT),
    st.booleans(),
)
def test_what_is_within_the_limits_of_every_field_is_parsed(
    messages: int, parts: int, biases: int, stops: int, num_ids: int, is_chat: bool
) -> None:
    request = GenerateRequest(
        sampling=SamplingParams(logit_bias={index: 0.5 for index in range(biases)}, stop=["x"] * stops)
    )
    if is_chat:
        request.chat.messages.extend([ChatMessage(role="user", content="hello")] * messages)
        request.chat.messages[-1].parts.extend([ChatPart(tool_call=ToolCall(id="1", name="f", arguments="{}"))] * parts)
    else:
        request.token_ids.ids.extend([CONTEXT - 1] * num_ids)
    assert is_taken(GENERATE, request.SerializeToString())


def huge(kind: str, count: int) -> bytes:
    """So many entries of one kind."""
    message = {
        "messages": lambda: GenerateRequest(chat=ChatMessages(messages=[ChatMessage()] * count)),
        "parts": lambda: GenerateRequest(chat=ChatMessages(messages=[ChatMessage(parts=[ChatPart()] * count)])),
        "tools": lambda: GenerateRequest(chat=ChatMessages(tools=[Tool()] * count)),
        "stop": lambda: GenerateRequest(sampling=SamplingParams(stop=[""] * count)),
        "stop_token_ids": lambda: GenerateRequest(sampling=SamplingParams(stop_token_ids=[1] * count)),
        "ids": lambda: GenerateRequest(token_ids=TokenIds(ids=[1] * count)),
        "bias": lambda: GenerateRequest(sampling=SamplingParams(logit_bias={index: 0.0 for index in range(count)})),
    }[kind]()
    return message.SerializeToString()


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(("messages", "parts", "tools", "stop", "bias")), st.integers(MAX_FIELDS, 20 * MAX_FIELDS))
def test_entries_without_number_are_not_parsed_whatever_they_are(kind: str, count: int) -> None:
    assert not is_taken(GENERATE, huge(kind, count))


@pytest.mark.parametrize("pair", [b"\x2a\x00", b"\x0a\x00", b"\x22\x00", b"\x30\x01", b"\x78\x01"])
def test_fields_said_again_and_again_are_not_parsed(pair: bytes) -> None:
    """The last one would count, or none where the field is not known: but each costs time."""
    assert not is_taken(GENERATE, pair * MIB)
    nested = pair * MIB
    assert not is_taken(GENERATE, b"\x2a" + _varint(len(nested)) + nested)


def _varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.binary(min_size=1, max_size=8), st.sampled_from((GENERATE, GRANT, TOKENIZE)))
def test_no_bytes_make_the_check_fail_otherwise_than_by_a_refusal(start: bytes, pattern: bytes, method: str) -> None:
    is_taken(method, start + pattern * (UNSEEN_BYTES // len(pattern) + 1))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_message_cut_off_anywhere_is_refused_or_parses(data: st.DataObject) -> None:
    whole = GenerateRequest(
        chat=ChatMessages(messages=[ChatMessage(role="user", content="c" * 90)] * 400), sampling=full_sampling()
    ).SerializeToString()
    raw = whole[: data.draw(st.integers(UNSEEN_BYTES + 1, len(whole)))]
    if not is_taken(GENERATE, raw):
        with pytest.raises(Exception, match="parsing"):
            GenerateRequest.FromString(raw)


PADDED: dict[str, Callable[[int], bytes]] = {
    "an unknown field": lambda size: b"\xfa\x07" + _varint(size) + bytes(size),
    "many unknown fields": lambda size: (b"\xfa\x07\x64" + bytes(100)) * (size // 100 + 1),
    "unknown numbers": lambda size: (b"\xf8\x07" + b"\xff" * 9 + b"\x01") * (size // 12 + 1),
    "unknown in sampling": lambda size: (
        b"\x2a" + _varint(size + 2 + len(_varint(size))) + b"\xfa\x07" + _varint(size) + bytes(size)
    ),
}


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(PADDED)), st.integers(70 << 10, MIB), st.booleans())
def test_a_request_padded_with_what_is_not_used_is_not_parsed(kind: str, size: int, is_granted: bool) -> None:
    raw = GenerateRequest(text="hello").SerializeToString() + PADDED[kind](size)
    if is_granted:
        assert not is_taken(GRANT, b"\x0a" + _varint(len(raw)) + raw)
    assert not is_taken(GENERATE, raw)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, MAX_UNKNOWN_BYTES - 20))
def test_a_later_versions_fields_are_let_through(size: int) -> None:
    raw = GenerateRequest(text="x" * UNSEEN_BYTES).SerializeToString() + b"\xfa\x07" + _varint(size) + bytes(size)
    assert is_taken(GENERATE, raw)


async def raw_call(router: Cluster, method: str, message: bytes, **options: Any) -> Refusal:
    """How a call with these bytes is refused."""
    async with grpc.aio.insecure_channel(
        f"127.0.0.1:{router.port}", options=(("grpc.max_send_message_length", -1),)
    ) as channel:
        multi_callable: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(method)
        return await refusal(multi_callable(message, **options))


ATTACKS: dict[str, tuple[str, Callable[[], bytes], tuple[str, str]]] = {
    "empty messages": (GENERATE, lambda: huge("messages", 2 * MIB), ("INVALID_REQUEST", "messages")),
    "empty messages to tokenize": (
        TOKENIZE,
        lambda: TokenizeRequest(chat=ChatMessages(messages=[ChatMessage()] * 2 * MIB)).SerializeToString(),
        ("INVALID_REQUEST", "messages"),
    ),
    "empty stop strings": (GENERATE, lambda: huge("stop", 2 * MIB), ("INVALID_REQUEST", "stop")),
    "token ids": (GENERATE, lambda: huge("ids", 6 * MIB), ("CONTEXT_LENGTH_EXCEEDED", "prompt")),
    "stop tokens": (
        GENERATE,
        lambda: GenerateRequest(text="x").SerializeToString() + huge("stop_token_ids", 6 * MIB),
        ("INVALID_REQUEST", "sampling.stop_token_ids"),
    ),
    "a stop string": (
        GENERATE,
        lambda: GenerateRequest(text="x", sampling=SamplingParams(stop=["s" * 6 * MIB])).SerializeToString(),
        ("INVALID_REQUEST", "sampling.stop"),
    ),
    "a request's name": (
        GENERATE,
        lambda: GenerateRequest(text="x", request_id="r" * 6 * MIB).SerializeToString(),
        ("INVALID_REQUEST", "request_id"),
    ),
    "ids to detokenize": (
        DETOKENIZE,
        lambda: DetokenizeRequest(token_ids=[5] * 6 * MIB).SerializeToString(),
        ("INVALID_REQUEST", "token_ids"),
    ),
    "no message": (GENERATE, lambda: b"\x0b" * 100, ("INVALID_REQUEST", "request")),
    "no message, long": (GENERATE, lambda: b"\xff" * MIB, ("INVALID_REQUEST", "request")),
}


@pytest.mark.parametrize("name", one_in(2, ATTACKS))
async def test_requests_without_measure_are_refused_at_once_with_a_row_of_the_error_table(name: str) -> None:
    method, made, expected = ATTACKS[name]
    message = made()
    async with cluster(FakeWorker("a")) as router:
        await router.answer("x")
        async with watched_loop() as work:
            refused = await raw_call(router, method, message)
        assert (refused.reason, refused.field) == expected
        assert refused.code == grpc.StatusCode.INVALID_ARGUMENT
        assert work.longest_s < MOST_WORK_S


async def test_detokenize_takes_as_many_ids_as_it_says_and_not_one_more() -> None:
    ids = [VOCAB_SIZE - 1] * MAX_DETOKENIZED_IDS
    most, more = (DetokenizeRequest(token_ids=some).SerializeToString() for some in (ids, [*ids, 1]))
    async with cluster(FakeWorker("a")) as router:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{router.port}") as channel, watched_loop() as work:
            method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(DETOKENIZE)
            await method(most)
        assert work.longest_s < MOST_WORK_S
        refused = await raw_call(router, DETOKENIZE, more)
    assert (refused.reason, refused.field) == ("INVALID_REQUEST", "token_ids")


async def test_a_message_over_the_limit_is_an_invalid_request_to_our_client() -> None:
    async with cluster(FakeWorker("a")) as router, Client(f"127.0.0.1:{router.port}") as client:
        with pytest.raises(InvalidRequest, match="larger than max"):
            await client.complete("x" * (MAX_REQUEST_BYTES + 1))


async def test_compressed_requests_are_refused_before_they_are_decompressed() -> None:
    async with cluster(FakeWorker("a")) as router:
        refused = await raw_call(router, GENERATE, huge("messages", 4 * MIB), compression=grpc.Compression.Gzip)
        assert refused.code == grpc.StatusCode.UNIMPLEMENTED
        assert "gzip" in refused.message
        await router.answer("x")


async def test_large_requests_beyond_what_memory_is_there_for_are_told_to_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = "x" * (UNSEEN_BYTES + 1000)
    bounds = Bounds(4 * len(text), of_host=4 * len(text), of_connection=4 * len(text), of_tenant=3 * len(text))
    monkeypatch.setattr(request_gate, "BYTE_BOUNDS", bounds)
    worker = FakeWorker("a", answer=None, context_length=1 << 20, kv_token_capacity=1 << 20)
    options = (("grpc.use_local_subchannel_pool", 1),)
    async with cluster(worker) as router, grpc.aio.insecure_channel(f"127.0.0.1:{router.port}", options) as other:
        stubs = {"c": InferenceServiceStub(other)}  # on a connection of its own

        def call(tenant: str, prompt: str = text) -> Any:
            stub: Any = stubs.get(tenant, router.stub)
            return stub.Generate(GenerateRequest(text=prompt), metadata=((TENANT_KEY, tenant),))

        running = []
        for tenant, fits in (("hog", True), ("hog", True), ("hog", False), ("b", True), ("c", True)):
            if fits:
                running.append(call(tenant))
                await worker.arrived.get()
                continue
            refused = await refusal(call(tenant))
            assert (refused.code, refused.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
            assert refused.retry_s
        displaced = await refusal(running.pop(0))  # by the one of c, which held nothing
        assert (displaced.code, displaced.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
        running.append(call("hog", "short"))  # of those there may be any number
        await worker.arrived.get()
        for one in running:
            one.cancel()
        await until(lambda: worker.num_running == 0)
        again = call("hog")
        await worker.arrived.get()
        again.cancel()
        await until(lambda: worker.num_running == 0)


async def test_large_requests_that_are_being_answered_leave_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "x" * (UNSEEN_BYTES + 1000)
    monkeypatch.setattr(request_gate, "BYTE_BOUNDS", replace(BYTE_BOUNDS, of_connection=len(text) + 100))
    worker = FakeWorker("a", answer=None, context_length=1 << 20, kv_token_capacity=1 << 20)
    async with cluster(worker) as router:
        running = []
        for _ in range(5):
            call = router.stub.Generate(GenerateRequest(text=text))
            choice = await worker.arrived.get()
            choice.tokens(1)
            assert await call.read() is not grpc.aio.EOF
            running.append(call)
        waiting = router.stub.Generate(GenerateRequest(text=text))
        await worker.arrived.get()
        assert (await refusal(router.stub.Generate(GenerateRequest(text=text)))).reason == "OVERLOADED"
        for call in (*running, waiting):
            call.cancel()
        await until(lambda: worker.num_running == 0)


def rss_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) / 256


async def attacked(router: Cluster, name: str, seconds: float) -> dict[str, int]:
    """What came of an attack from another process."""
    module = "trunkline_bench.attacks.vectors.attacker"
    command = ("-m", module, name, f"127.0.0.1:{router.port}", f"--seconds={seconds}")
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=asyncio.subprocess.PIPE)
    printed, _ = await process.communicate()
    found: dict[str, int] = json.loads(printed)
    return found


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is looked up in /proc")
@pytest.mark.parametrize("name", ["rapid reset", "20,000 half-open streams"])
async def test_streams_that_say_nothing_take_neither_memory_nor_time(name: str) -> None:
    async with cluster(FakeWorker("a")) as router:
        await router.answer("x")
        before = rss_mib()
        streams = 0
        while streams < LEAST_STREAMS:
            streams += (await attacked(router, name, 1.0)).get("streams", 0)
        began_s = time.process_time()
        await router.answer("x")
        assert time.process_time() - began_s < 2.0
        assert rss_mib() - before < 200
