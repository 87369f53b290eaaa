"""What /v1/messages and its count of tokens refuse, in Anthropic's shape and by the client's own names."""

import pytest

from tests.router.anthropic.messages_client import HI, Json, client, error_of
from tests.router.fake_worker import FakeWorker
from tests.router.tokenizer_files import tokenizer_files
from trunkline_router.prompts.conversation import MAX_PARTS


def content(block: Json) -> Json:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "see"}, block]}]}


def said(block: Json) -> Json:
    return {"role": "assistant", "content": [block]}


SOURCE = {"type": "base64", "media_type": "image/png", "data": "AA=="}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
USE = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": "x"}

REFUSED: dict[str, tuple[Json, str]] = {
    "image": (content({"type": "image", "source": SOURCE}), "messages[0].content[1]: content of type 'image'"),
    "document": (content({"type": "document", "source": SOURCE}), "content of type 'document'"),
    "call of the user": (
        content(USE),
        "messages[0].content[1]: content of type 'tool_use' is only allowed in messages",
    ),
    "thinking of the user": (content({"type": "thinking", "thinking": "hm", "signature": ""}), "of 'assistant'"),
    "result of the assistant": ({"messages": [HI, said(RESULT)]}, "messages[1].content[0]: content of type 'tool_r"),
    "call without input": (
        {"messages": [HI, said({"type": "tool_use", "id": "1", "name": "f"})]},
        "messages[1].content[0].input: field required",
    ),
    "call with a text as input": ({"messages": [HI, said({**USE, "input": "{}"})]}, "messages[1].content[0].input: "),
    "call without a name": ({"messages": [HI, said({**USE, "name": ""})]}, "messages[1].content[0].name: "),
    "unknown field of a call": ({"messages": [HI, said({**USE, "mood": 1})]}, "messages[1].content[0].mood: is not"),
    "call without a place": ({"messages": [HI, said(USE)]}, "messages: the model's chat template has no place for c"),
    "image in a result": (
        content({**RESULT, "content": [{"type": "text", "text": "x"}, {"type": "image", "source": SOURCE}]}),
        "messages[0].content[1].content[1]: content of type 'image'",
    ),
    "many texts in a result": (
        content({**RESULT, "content": [{"type": "text", "text": "x"}] * MAX_PARTS}),
        f"messages: has {MAX_PARTS + 2} parts of contents, more than {MAX_PARTS}",
    ),
    "call of a server's tool": (content({"type": "server_tool_use", "id": "1"}), "tools run at the client alone"),
    "image in the system prompt": ({"system": [{"type": "image", "source": SOURCE}]}, "system[0]: content of type"),
    "text block without text": (content({"type": "text"}), "messages[0].content[1].text: field required"),
    "tools without a place": ({"tools": [TOOL]}, "tools: the model's chat template has no place for tools"),
    "tool with a schema of Anthropic's": (
        {"tools": [TOOL, {"type": "bash_20250124", "name": "bash"}]},
        "tools[1].type: 'bash_20250124' is not supported: tools run at the client alone",
    ),
    "tool without a schema": ({"tools": [{"name": "f"}]}, "tools[0].input_schema: field required"),
    "tool without a name": ({"tools": [{"input_schema": {}}]}, "tools[0].name: field required"),
    "unknown field of a tool": ({"tools": [{**TOOL, "parameters": {}}]}, "tools[0].parameters: is not a known field"),
    "examples of a tool": ({"tools": [{**TOOL, "input_examples": [{}]}]}, "tools[0].input_examples: is not supported"),
    "code that calls": ({"tools": [{**TOOL, "allowed_callers": ["x"]}]}, "tools[0].allowed_callers: is not supported"),
    "too many tools": ({"tools": [TOOL] * 1025}, "tools: "),
    "another choice of tools": (
        {"tools": [TOOL], "tool_choice": {"type": "some"}},
        "tool_choice.type: input should be",
    ),
    "thinking": ({"thinking": {"type": "between_tools"}}, "thinking.type: "),
    "thinking in another form": ({"thinking": {"type": "adaptive", "display": "whole"}}, "thinking.display: "),
    "servers": ({"mcp_servers": [{"type": "url", "url": "https://x"}]}, "mcp_servers: is not supported"),
    "container": ({"container": "c"}, "container: is not supported"),
    "thread": ({"thread": {"type": "create"}}, "thread: is not supported: conversations are not stored"),
    "output_config": ({"output_config": {"task_budget": 1}}, "output_config.task_budget: is not supported"),
    "unknown field": ({"guided_json": {}}, "guided_json: is not a known field"),
    "unknown field of a message": ({"messages": [{**HI, "mood": 1}]}, "messages[0].mood: is not a known field"),
    "unknown field of a block": (content({"type": "text", "text": "x", "mood": 1}), "messages[0].content[1].mood: is"),
    "role": ({"messages": [{"role": "owl", "content": "hoo"}]}, "messages[0].role: "),
    "no messages": ({"messages": []}, "messages: "),
    "messages of another type": ({"messages": "hi"}, "messages: "),
    "content of another type": ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content: "),
    "variables that are the router's": ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs: "),
}
REFUSED_BY_MESSAGES: dict[str, tuple[Json, str]] = {
    "max_tokens of zero": ({"max_tokens": 0}, "max_tokens: "),
    "max_tokens of null": ({"max_tokens": None}, "max_tokens: "),
    "max_tokens in quotes": ({"max_tokens": "8"}, "max_tokens: "),
    "empty stop sequence": ({"stop_sequences": [""]}, "stop_sequences: stop string 0 has 0 bytes"),
    "stop sequence that is no list": ({"stop_sequences": "x"}, "stop_sequences: "),
    "temperature": ({"temperature": -1}, "temperature: "),
    "top_p": ({"top_p": 0}, "top_p: "),
    "top_k": ({"top_k": -2}, "top_k: "),
    "stop of OpenAI": ({"stop": ["x"]}, "stop: is not a known field"),
    "n of OpenAI": ({"n": 2}, "n: is not a known field"),
}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_refused_by_name(stream: bool) -> None:
    worker = FakeWorker("w")
    async with client(worker) as messages:
        for name, (body, message) in (REFUSED | REFUSED_BY_MESSAGES).items():
            error = await messages.refusal(stream=stream, **body)
            assert error["type"] == "invalid_request_error", name
            assert message in error["message"], name
    assert not worker.submits


async def test_a_count_is_refused_by_name() -> None:
    async with client(FakeWorker("w")) as messages:
        for name, (body, message) in REFUSED.items():
            response = await messages.http.post("/v1/messages/count_tokens", json={"messages": [HI], **body})
            assert response.status_code == 400, name
            assert message in error_of(response)["message"], name


async def test_a_client_learns_that_it_may_ask_again_without_a_thread() -> None:
    async with client(FakeWorker("w")) as messages:
        error = await messages.refusal(thread={"type": "create"})
        assert error["details"] == {"error_code": "thread_unsupported_request"}
        assert "details" not in await messages.refusal(container="c")


async def test_max_tokens_is_required() -> None:
    async with client(FakeWorker("w")) as messages:
        response = await messages.http.post("/v1/messages", json={"messages": [HI]})
        assert response.status_code == 400
        assert error_of(response)["message"] == "max_tokens: field required"


async def test_a_model_without_a_template_names_the_messages() -> None:
    async with client(FakeWorker("w", files=tokenizer_files(chat_template=None))) as messages:
        assert (await messages.refusal())["message"].startswith("messages: ")


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_errors_have_the_type_that_goes_with_their_status(path: str) -> None:
    async with client(FakeWorker("w")) as messages:
        body = {"messages": [HI], "model": "large"} | ({"max_tokens": 8} if path == "/v1/messages" else {})
        unknown = await messages.http.post(path, json=body)
        assert (unknown.status_code, error_of(unknown)["type"]) == (404, "not_found_error")
        broken = await messages.http.post(path, content=b"{", headers={"content-type": "application/json"})
        assert (broken.status_code, error_of(broken)["type"]) == (400, "invalid_request_error")
