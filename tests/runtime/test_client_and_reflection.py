"""The client against a real server: what it sends, and that it cancels its calls."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import format_trace_id

from tests.runtime.unimplemented_service import UnimplementedService
from trunkline import Client
from trunkline.client.client_requests import generate_request, tokenize_request
from trunkline.errors import DeadlineExceeded, NoWorker, TrunklineError
from trunkline.v1.generation_pb2 import OutputChunk, ToolCall
from trunkline.v1.inference_pb2 import (
    ChatMessage,
    ChatMessages,
    ChatPart,
    GenerateRequest,
    GenerateResponse,
    ListModelsResponse,
    Tool,
    ToolResult,
)
from trunkline.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from trunkline.v1.worker_pb2 import Grammar, GrammarKind
from trunkline_runtime.server import GrpcServer

SERVICE = "trunkline.v1.InferenceService"


class Endless(UnimplementedService):
    """Answers once, then only waits; tells what it was asked and when it was cancelled."""

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []
        self.metadata: dict[str, str] = {}
        self.cancelled = asyncio.Event()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[GenerateResponse]:
        self.requests.append(request)
        self.metadata = dict(context.invocation_metadata())
        try:
            yield GenerateResponse(request_id="r", chunks=[OutputChunk(index=0, text="a")])
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()


@pytest.fixture
async def served() -> AsyncIterator[tuple[str, Endless]]:
    endless = Endless()
    server = GrpcServer("127.0.0.1", 0, services=[SERVICE])
    add_InferenceServiceServicer_to_server(endless, server.grpc)
    await server.start()
    yield f"127.0.0.1:{server.port}", endless
    await server.stop(0)


async def test_closing_the_iterator_cancels_the_request(served: tuple[str, Endless]) -> None:
    address, endless = served
    async with Client(address) as client:
        pieces: Any = client.generate("x")
        assert (await anext(pieces)).text == "a"
        assert not endless.cancelled.is_set()
        await pieces.aclose()
        await asyncio.wait_for(endless.cancelled.wait(), 60)


async def test_a_deadline_that_passes_is_its_own_exception_and_cancels(served: tuple[str, Endless]) -> None:
    address, endless = served
    async with Client(address) as client:
        with pytest.raises(DeadlineExceeded):
            await client.complete("x", timeout_s=3.0)
        await asyncio.wait_for(endless.cancelled.wait(), 60)


async def test_a_prompt_is_text_tokens_or_a_conversation(served: tuple[str, Endless]) -> None:
    address, endless = served
    chat = [("system", "be kind"), ("user", "hi")]
    async with Client(address, model="m") as client:
        for prompt in ("x", [1, 2], chat, [{"role": role, "content": content} for role, content in chat]):
            pieces: Any = client.generate(prompt, max_tokens=3, stop=["\n"])
            await anext(pieces)
            await pieces.aclose()
    text, ids, pairs, mappings = endless.requests
    assert (text.text, text.model, text.sampling.max_tokens, list(text.sampling.stop)) == ("x", "m", 3, ["\n"])
    assert list(ids.token_ids.ids) == [1, 2]
    assert pairs.chat == mappings.chat
    assert [(message.role, message.content) for message in pairs.chat.messages] == chat


TOOL_USE: list[Any] = [
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "r",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
            {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "c"},
]
PARTS = ChatMessages(
    messages=[
        ChatMessage(role="user", parts=[ChatPart(text="a"), ChatPart(text="b")]),
        ChatMessage(
            role="assistant",
            parts=[
                ChatPart(reasoning="r"),
                ChatPart(tool_call=ToolCall(id="1", name="f", arguments='{"x": 1}')),
                ChatPart(tool_call=ToolCall(name="f", arguments='{"x": 1}')),
            ],
        ),
        ChatMessage(role="tool", parts=[ChatPart(tool_result=ToolResult(call_id="1", parts=[ChatPart(text="c")]))]),
    ]
)


@pytest.mark.parametrize("chat", [TOOL_USE, PARTS, PARTS.messages, [PARTS.messages[0], *TOOL_USE[1:]]])
def test_a_conversation_has_openais_form_or_that_of_the_contract(chat: Any) -> None:
    assert generate_request(chat, model="", n=None, request_id="", lane=None).chat == PARTS
    assert tokenize_request(chat, model="", special_tokens=True).chat == PARTS


FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}}


@pytest.mark.parametrize(
    ("tool", "strict"),
    [
        ({"type": "function", "function": FUNCTION}, False),
        ({"type": "function", "function": FUNCTION | {"strict": True}}, True),
        (Tool(name="f", description="d", parameters='{"type": "object"}'), False),
    ],
)
def test_a_tool_has_openais_form_or_that_of_the_contract(tool: Any, strict: bool) -> None:
    request = generate_request(PARTS, model="", n=None, request_id="", lane=None, tools=[tool])
    expected = Tool(name="f", description="d", parameters='{"type": "object"}', strict=strict)
    assert request.chat.tools == [expected]
    assert not PARTS.tools


@pytest.mark.parametrize(
    ("prompt", "tool", "problem"),
    [
        ("x", {"type": "function", "function": FUNCTION}, "need a conversation"),
        ([1], {"type": "function", "function": FUNCTION}, "need a conversation"),
        (TOOL_USE, {"type": "custom", "custom": {"name": "f"}}, "must be a function"),
        (TOOL_USE, FUNCTION, "must be a function"),
        (TOOL_USE, {"type": "function", "function": {}}, "must be a function with a name"),
        (TOOL_USE, {"type": "function", "function": FUNCTION | {"schema": {}}}, "must not have schema"),
    ],
)
def test_a_tool_that_the_client_cannot_send_is_refused(prompt: Any, tool: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        generate_request(prompt, model="", n=None, request_id="", lane=None, tools=[tool])


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"json_schema": {"title": "ü"}}, GrammarKind.GRAMMAR_KIND_JSON_SCHEMA, '{"title": "ü"}'),
        ({"json_schema": '{"title":"ü"}'}, GrammarKind.GRAMMAR_KIND_JSON_SCHEMA, '{"title":"ü"}'),
        ({"regex": "[0-9]+"}, GrammarKind.GRAMMAR_KIND_REGEX, "[0-9]+"),
        ({"choice": ["yes", "no"]}, GrammarKind.GRAMMAR_KIND_CHOICE, '["yes", "no"]'),
        (Grammar(kind=GrammarKind.GRAMMAR_KIND_LARK, text="x"), GrammarKind.GRAMMAR_KIND_LARK, "x"),
    ],
)
def test_a_grammar_is_a_kind_with_its_value_or_that_of_the_contract(given: Any, kind: Any, text: str) -> None:
    request = generate_request("x", model="", n=None, request_id="", lane=None, grammar=given)
    assert request.grammar == Grammar(kind=kind, text=text)
    assert not generate_request("x", model="", n=None, request_id="", lane=None).HasField("grammar")


@pytest.mark.parametrize("given", [{}, {"schema": {}}, {"regex": "a", "choice": ["a"]}, {"unspecified": "a"}])
def test_a_grammar_of_no_known_kind_is_refused(given: Any) -> None:
    with pytest.raises(
        ValueError, match=r"a grammar is one of json_schema, regex, .*, not (empty|schema|regex, ch|unsp)"
    ):
        generate_request("x", model="", n=None, request_id="", lane=None, grammar=given)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ('{"type": "object"}', "a kind with its value, not str"),
        ({"choice": {"yes", "no"}}, "the value of choice is no JSON: .* set "),
        ({"json_schema": {"maximum": float("nan")}}, "the value of json_schema is no JSON: .*float values"),
        ({1: "a"}, "not 1"),
    ],
)
def test_a_grammar_that_cannot_be_sent_is_refused(given: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        generate_request("x", model="", n=None, request_id="", lane=None, grammar=given)


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_has_either_name(name: str) -> None:
    (message,) = tokenize_request([{"role": "assistant", name: "r"}], model="", special_tokens=True).chat.messages
    assert message == ChatMessage(role="assistant", parts=[ChatPart(reasoning="r")])


def test_parts_that_are_texts_have_several_types() -> None:
    parts = [{"type": kind, "text": kind} for kind in ("text", "input_text", "output_text")]
    parts.append({"type": "refusal", "refusal": "no"})
    (message,) = tokenize_request([{"role": "user", "content": parts}], model="", special_tokens=True).chat.messages
    assert [part.text for part in message.parts] == ["text", "input_text", "output_text", "no"]


@pytest.mark.parametrize(
    "call", [{"type": "custom", "custom": {"name": "f", "input": "x"}}, {"type": "function"}, {"function": {}}]
)
def test_a_call_that_the_client_cannot_send_is_refused(call: Any) -> None:
    with pytest.raises(ValueError, match="a call must be a function with a name"):
        tokenize_request([{"role": "assistant", "tool_calls": [call]}], model="", special_tokens=True)


def test_a_part_that_the_client_cannot_send_is_named() -> None:
    for parts in ([{"type": "text", "text": "a"}, {"type": "image_url"}], [{"text": "a"}], [{"type": "text"}]):
        with pytest.raises(ValueError, match=r"must be texts, not (image_url|None|text)"):
            tokenize_request([{"role": "user", "content": parts}], model="", special_tokens=True)


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"role": "user", "content": "x", "images": ["y"]}, "images"),
        ({"role": "user", "text": "x"}, "text"),
        ({"role": "assistant", "content": None, "function_call": {"name": "f"}}, "function_call"),
        ({"role": "tool", "content": "x", "tool_call_id": "1", "tool_calls": [{}]}, "tool_calls"),
        ({"role": "user"}, "content"),
        ({"content": "x"}, "a role"),
    ],
)
def test_a_field_of_a_message_that_the_client_cannot_send_is_named(message: Any, named: str) -> None:
    with pytest.raises(ValueError, match=f"must (not )?have {named}"):
        tokenize_request([message], model="", special_tokens=True)


def test_fields_without_a_value_are_left_out() -> None:
    message: Any = {"role": "assistant", "content": "x", "refusal": None, "name": "a", "images": [], "tool_calls": None}
    made = tokenize_request([message], model="", special_tokens=True)
    assert made.chat == ChatMessages(messages=[ChatMessage(role="assistant", content="x")])


async def test_the_callers_span_goes_along_and_only_where_there_is_one(served: tuple[str, Endless]) -> None:
    address, endless = served
    async with Client(address) as client:
        with TracerProvider().get_tracer("test").start_as_current_span("caller") as span:
            pieces: Any = client.generate("x")
            await anext(pieces)
            await pieces.aclose()
        assert endless.metadata["traceparent"].split("-")[1] == format_trace_id(span.get_span_context().trace_id)
        pieces = client.generate("x")
        await anext(pieces)
        await pieces.aclose()
        assert "traceparent" not in endless.metadata


async def test_lane_and_tenant_go_along(served: tuple[str, Endless]) -> None:
    address, endless = served
    async with Client(address, tenant="acme") as client:
        for lane in (None, "interactive", "standard", "batch"):
            pieces: Any = client.generate("x", lane=lane)
            await anext(pieces)
            await pieces.aclose()
            assert endless.metadata["x-trunkline-tenant"] == "acme"
        for bad in ("express", "unspecified", "BATCH", ""):
            with pytest.raises(ValueError, match="is not a lane; allowed: interactive, standard, batch"):
                await client.complete("x", lane=bad)
    assert [request.lane for request in endless.requests] == [0, 1, 2, 3]


async def test_without_a_tenant_none_is_named_and_a_bad_one_is_refused(served: tuple[str, Endless]) -> None:
    address, endless = served
    async with Client(address) as client:
        pieces: Any = client.generate("x")
        await anext(pieces)
        await pieces.aclose()
    assert "x-trunkline-tenant" not in endless.metadata
    for bad in ("müller", "a\nb", "x" * 129):
        with pytest.raises(ValueError, match="printable ASCII"):
            Client(address, tenant=bad)


async def test_a_session_goes_along_with_its_requests_only_and_a_bad_one_is_refused(
    served: tuple[str, Endless],
) -> None:
    address, endless = served
    async with Client(address) as client:
        for session in ("chat-7", ""):
            pieces: Any = client.generate("x", session=session)
            await anext(pieces)
            await pieces.aclose()
            assert endless.metadata.get("x-trunkline-session", "") == session
        for bad in ("gespräch", "a\nb", "x" * 257):
            with pytest.raises(ValueError, match=r"session .* must be at most 256 bytes of printable ASCII"):
                await client.complete("x", session=bad)


def server_of(port: int) -> GrpcServer:
    server = GrpcServer("127.0.0.1", port, services=[SERVICE])
    add_InferenceServiceServicer_to_server(Endless(), server.grpc)
    return server


async def test_ready_waits_for_a_router_that_starts_and_for_its_first_worker() -> None:
    server = server_of(0)
    await server.start()
    port = server.port
    await server.stop(0)
    async with Client(f"127.0.0.1:{port}") as client:
        waiting = asyncio.create_task(client.ready(30))
        with pytest.raises(DeadlineExceeded, match=r"was not ready within 0\.2 s"):
            await client.ready(0.2)
        server = server_of(port)
        await server.start()
        with pytest.raises(DeadlineExceeded, match=f"127.0.0.1:{port} was not ready"):
            await client.ready(0.2)
        assert not waiting.done()
        await server.stop(0)  # it restarts before it is ready
        server = server_of(port)
        await server.start()
        await server.set_ready(True)
        await waiting
        await client.ready(30)
        await server.stop(0)


async def test_ready_before_something_that_is_no_router_says_so() -> None:
    bare = grpc.aio.server()
    port = bare.add_insecure_port("127.0.0.1:0")
    await bare.start()
    async with Client(f"127.0.0.1:{port}") as client:
        with pytest.raises(TrunklineError):
            await client.ready(30)
    await bare.stop(0)


async def test_a_field_that_does_not_exist_and_a_server_that_is_not_there() -> None:
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(ValueError, match="max_tokenz"):
            await client.complete("x", max_tokenz=1)  # type: ignore[call-arg]
        with pytest.raises(NoWorker) as caught:
            await client.complete("x")
        assert isinstance(caught.value, TrunklineError)
        assert caught.value.reason == "", "no server answered"


async def test_reflection_lists_the_services(served: tuple[str, Endless]) -> None:
    async with grpc.aio.insecure_channel(served[0]) as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        (answer,) = [one async for one in stub.ServerReflectionInfo(asked)]
    names = {service.name for service in answer.list_services_response.service}
    assert names == {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


class Counting(UnimplementedService):
    """Answers at once; tells over which connections it was asked."""

    def __init__(self) -> None:
        self.peers: list[str] = []

    async def ListModels(self, request: Any, context: Any) -> ListModelsResponse:
        self.peers.append(context.peer())
        return ListModelsResponse()


@pytest.fixture
async def counting() -> AsyncIterator[list[tuple[int, Counting]]]:
    """Two servers and their ports."""
    servers, made = [], []
    for _ in range(2):
        service, server = Counting(), GrpcServer("127.0.0.1", 0, services=[SERVICE])
        add_InferenceServiceServicer_to_server(service, server.grpc)
        await server.start()
        await server.set_ready(True)
        servers.append(server)
        made.append((server.port, service))
    yield made
    for server in servers:
        await server.stop(0)


async def test_requests_take_turns_among_connections_of_their_own(counting: list[tuple[int, Counting]]) -> None:
    port, service = counting[0]
    async with Client(f"127.0.0.1:{port}", connections=3) as client:
        await client.ready()
        for _ in range(6):
            await client.list_models()
    assert len(set(service.peers)) == 3
    assert service.peers[:3] == service.peers[3:]


async def test_requests_take_turns_among_the_routers_that_a_name_stands_for(
    counting: list[tuple[int, Counting]],
) -> None:
    addresses = ",".join(f"127.0.0.1:{port}" for port, _ in counting)
    async with Client(f"ipv4:{addresses}") as client:
        while not all(service.peers for _, service in counting):  # the second connection may take a moment
            await client.list_models()
        before = [len(service.peers) for _, service in counting]
        for _ in range(6):
            await client.list_models()
    assert [len(service.peers) - count for (_, service), count in zip(counting, before, strict=True)] == [3, 3]
