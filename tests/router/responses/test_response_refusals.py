"""What /v1/responses refuses, by the client's own names."""

import pytest

from tests.router.fake_worker import FakeWorker
from tests.router.responses.responses_client import Json, client, error_of, new_store


def part(**fields: object) -> Json:
    return {"input": [{"role": "user", "content": [{"type": "input_text", "text": "see"}, fields]}]}


def item(**fields: object) -> Json:
    return {"input": [{"role": "user", "content": "hi"}, fields]}


FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}

# name → body, the field at fault, what the message says
REFUSED: dict[str, tuple[Json, str, str]] = {
    "image": (part(type="input_image", image_url="data:"), "input[0].content[1]", "'input_image' is not supported"),
    "file": (part(type="input_file", file_id="f"), "input[0].content[1]", "'input_file' is not supported"),
    "audio": (part(type="input_audio", input_audio={}), "input[0].content[1]", "'input_audio' is not supported"),
    "part without text": (part(type="input_text"), "input[0].content[1].text", "is missing"),
    "function call without arguments": (
        item(type="function_call", call_id="c", name="f"),
        "input[1].arguments",
        "field required",
    ),
    "function call without a name": (
        item(type="function_call", call_id="c", name="", arguments="{}"),
        "input[1].name",
        "at least 1 character",
    ),
    "function output without a call": (
        item(type="function_call_output", output="1"),
        "input[1].call_id",
        "field required",
    ),
    "function output of an image": (
        item(type="function_call_output", call_id="c", output=[{"type": "input_image", "image_url": "data:"}]),
        "input[1].output[0]",
        "'input_image' is not supported",
    ),
    "encrypted reasoning in parts": (
        item(type="reasoning", summary=[], content=[{"type": "redacted", "text": ""}]),
        "input[1].content[0].type",
        "input should be 'reasoning_text'",
    ),
    "call of another tool": (
        item(type="web_search_call", id="w", action={"type": "search"}),
        "input[1].type",
        "'web_search_call' is not supported: tools are functions",
    ),
    "another item": (item(type="compaction", id="c"), "input[1].type", "'compaction' is not supported"),
    "item of no type": (item(type=7), "input[1].type", "valid string"),
    "item reference": (item(type="item_reference", id="msg_1"), "input[1].id", "no stored response has this item"),
    "item reference without a type": (item(id="msg_1"), "input[1].id", "no stored response has this item"),
    "message without a role": (item(content="hi"), "input[1].role", "field required"),
    "message without content": (item(role="user"), "input[1].content", "field required"),
    "role": (item(role="owl", content="hoo"), "input[1].role", "input should be 'developer'"),
    "another tool": ({"tools": [FUNCTION, {"type": "shell"}]}, "tools[1].type", "'shell' is not supported"),
    "format of a function": ({"tools": [{**FUNCTION, "format": {"type": "text"}}]}, "tools[0].format", "custom"),
    "tool without a name": ({"tools": [{"type": "function"}]}, "tools[0].name", "field required"),
    "tool without a type": ({"tools": [{"name": "f"}]}, "tools[0].type", "field required"),
    "chat's tool": ({"tools": [{"type": "function", "function": FUNCTION}]}, "tools[0].name", "field required"),
    "tool that is loaded later": ({"tools": [{**FUNCTION, "defer_loading": True}]}, "tools[0].defer_loading", "is not"),
    "schema that is no object": ({"tools": [{**FUNCTION, "parameters": []}]}, "tools[0].parameters", "dictionary"),
    "tools without a place in the template": ({"tools": [FUNCTION]}, "tools", "has no place for tools"),
    "required call without tools": ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
    "tool choice of nothing": ({"tool_choice": {}}, "tool_choice", "must be 'auto'"),
    "tool choice by name": ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "none of the tools"),
    "allowed tools": (
        {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}},
        "tool_choice",
        "none of the tools",
    ),
    "max_tool_calls": ({"max_tool_calls": 3}, "max_tool_calls", "runs no tools"),
    "reasoning effort": ({"reasoning": {"effort": "hihg"}}, "reasoning.effort", "must be one of"),
    "reasoning summary": ({"reasoning": {"summary": "long"}}, "reasoning.summary", "input should be 'auto'"),
    "reasoning context": ({"reasoning": {"context": "all_turns"}}, "reasoning.context", "is not supported"),
    "background": ({"background": True}, "background", "is not supported"),
    "conversation": ({"conversation": "conv_1"}, "conversation", "use previous_response_id"),
    "prompt": ({"prompt": {"id": "pmpt_1"}}, "prompt", "prompt templates are not served"),
    "truncation": ({"truncation": "auto"}, "truncation", "'auto' is not supported"),
    "context_management": ({"context_management": [{"type": "compaction"}]}, "context_management", "is not supported"),
    "schema": ({"text": {"format": {"type": "json_schema", "name": "s"}}}, "text.format.schema", "field required"),
    "verbosity": ({"text": {"verbosity": "none"}}, "text.verbosity", "input should be 'low'"),
    "include": ({"include": ["file_search_call.results"]}, "include", "'file_search_call.results' is not supported"),
    "top_logprobs alone": ({"top_logprobs": 2}, "top_logprobs", "needs include"),
    "too many top_logprobs": ({"top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    "store without a store": ({"store": True}, "store", "this server stores no responses"),
    "stream options without a stream": ({"stream_options": {}}, "stream_options", "stream: true"),
    "n": ({"n": 2}, "n", "one choice"),
    "prompt_logprobs": ({"prompt_logprobs": 0}, "prompt_logprobs", "is not supported for responses"),
    "return_token_ids": ({"return_token_ids": True}, "return_token_ids", "is not supported for responses"),
    "chat's messages": ({"messages": [{"role": "user", "content": "hi"}]}, "messages", "use input"),
    "chat's max_tokens": ({"max_tokens": 3}, "max_tokens", "use max_output_tokens"),
    "unknown field": ({"mood": "good"}, "mood", "is not a known field"),
    "unknown field of a message": (item(role="user", content="hi", mood=1), "input[1].mood", "is not a known field"),
    "unknown field of a part": (
        part(type="input_text", text="a", mood=1),
        "input[0].content[1].mood",
        "is not a known field",
    ),
    "unknown field of text": ({"text": {"mood": 1}}, "text.mood", "is not a known field"),
    "guided": ({"guided_regex": "a"}, "guided_regex", "use structured_outputs"),
    "no model": ({"model": None}, "model", "valid string"),
    "no input": ({"input": None}, "input", "is missing or empty"),
    "empty text": ({"input": ""}, "input", "is missing or empty"),
    "empty list": ({"input": []}, "input", "is missing or empty"),
    "input of another type": ({"input": 7}, "input", "should be a valid list"),
    "content of another type": (item(role="user", content=7), "input[1].content", "should be a valid list"),
    "lone surrogate": ({"input": "\ud800"}, "body", "hex escape"),
    "lone surrogate in metadata": ({"metadata": {"a": "\ud800"}}, "body", "hex escape"),
    "lone surrogate in instructions": ({"instructions": "\udfff"}, "body", "hex escape"),
    "max_output_tokens": ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
    "more tokens than the context": ({"max_output_tokens": 1 << 20}, "max_output_tokens", "context length"),
    "temperature": ({"temperature": 200}, "temperature", "200 is not in"),
    "temperature in quotes": ({"temperature": "1"}, "temperature", "valid number"),
    "metadata of numbers": ({"metadata": {"a": 1}}, "metadata.a", "valid string"),
    "too much metadata": ({"metadata": {str(n): "" for n in range(17)}}, "metadata", "at most 16"),
    "variables that are the router's": (
        {"chat_template_kwargs": {"messages": 1}},
        "chat_template_kwargs",
        "messages",
    ),
}


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_are_refused_by_name(stream: bool) -> None:
    worker = FakeWorker("w")
    async with client(worker) as responses:
        for name, (body, field, message) in REFUSED.items():
            if stream and name == "stream options without a stream":
                continue
            error = await responses.refusal(stream=stream, **body)
            assert (name, error["type"], error["param"]) == (name, "invalid_request_error", field)
            assert message in error["message"], name
    assert not worker.submits


async def test_an_unknown_model_is_not_found() -> None:
    async with client(FakeWorker("w")) as responses:
        error = await responses.refusal(404, model="huge")
        assert (error["code"], error["param"]) == ("model_not_found", "model")


async def test_paths_of_openai_that_are_not_served_are_unknown() -> None:
    async with client(FakeWorker("w"), store=new_store()) as responses:
        for path in ("compact", "input_tokens", "resp_1/cancel", "resp_1/input_items"):
            assert error_of(await responses.http.post(f"/v1/responses/{path}", json={}), 404)["code"] == "not_found"


async def test_a_wrong_method_is_told_which_ones_there_are() -> None:
    async with client(FakeWorker("w")) as responses:
        for path, allowed in (("/v1/responses", {"POST"}), ("/v1/responses/resp_1", {"GET", "HEAD", "DELETE"})):
            answer = await responses.http.put(path, json={})
            assert error_of(answer, 405)["code"] == "method_not_allowed"
            assert set(answer.headers["allow"].split(", ")) == allowed
