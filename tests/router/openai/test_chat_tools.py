"""POST /v1/chat/completions with tools: what of them reaches the template, and what is refused."""

import json
import re
from typing import Any

import pytest

from tests.router.fake_worker import FakeWorker
from tests.router.openai.openai_rig import CHAT, OpenAiClient, client
from tests.router.tokenizer_files import byte_tokenizer, tokenizer_files
from trunkline.v1.worker_pb2 import Capability

PATH = "/v1/chat/completions"
# What a template gets, as JSON.
SHOWING = "{{ {'messages': messages, 'tools': tools, 'effort': reasoning_effort|default(none), "
SHOWING += "'documents': documents}|tojson }}"
SHOWING += "{# content tool_calls #}"
WEATHER = {
    "name": "weather",
    "description": "The weather of a place.",
    "parameters": {"type": "object", "properties": {"place": {"type": "string", "default": None}}},
}
TOOLS = [{"type": "function", "function": WEATHER}]


def call(arguments: str = '{"place": "Graz"}', **more: Any) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}, **more}


def said(*calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **more}


def worker(template: str = SHOWING, **options: Any) -> FakeWorker:
    files = tokenizer_files(chat_template=template)
    options = {"capabilities": [Capability.CAPABILITY_GRAMMARS], **options}
    return FakeWorker("w", files=files, answer_format="hermes", context_length=1 << 16, **options)


async def shown(asks: OpenAiClient, **body: Any) -> dict[str, Any]:
    """What the template gets."""
    answer = await asks.answer(PATH, **{"messages": CHAT, "return_token_ids": True, "max_tokens": 1, **body})
    given: dict[str, Any] = json.loads(byte_tokenizer().decode(answer["prompt_token_ids"]))
    counted = await asks.answer("/tokenize", **{"messages": CHAT, **body})
    assert counted["tokens"] == answer["prompt_token_ids"]
    return given


async def test_tools_reach_the_template_as_they_were_sent() -> None:
    strict = {"type": "function", "function": {**WEATHER, "strict": True}, "cache_control": {"type": "ephemeral"}}
    bare = {"type": "function", "function": {"name": "now"}}
    told: list[Any] = [{"tools": TOOLS}, {"tools": [strict]}, {"tools": TOOLS, "tool_choice": "auto"}]
    untold: list[Any] = [
        {},
        {"tools": []},
        *({"tools": TOOLS, "tool_choice": one} for one in ("none", {"type": "none"})),
    ]
    async with client(worker()) as asks:
        assert [(await shown(asks, **body))["tools"] for body in told] == [TOOLS] * 3
        assert [(await shown(asks, **body))["tools"] for body in untold] == [None] * 4
        assert (await shown(asks, tools=[bare]))["tools"] == [bare]


async def test_calls_results_and_reasoning_of_earlier_turns_reach_the_template() -> None:
    other = call('{"place": "Linz"}', id="call_2", index=1)
    other["function"]["parsed_arguments"] = {"place": "Linz"}  # as openai's parse() returns it
    turns = [
        {"role": "user", "content": "Rain?"},
        said(call(), other, content="I ask.", reasoning="Hm.", refusal=None, annotations=[], function_call=None),
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        {
            "role": "tool",
            "tool_call_id": "call_2",
            "name": "weather",
            "content": [{"type": "text", "text": "sun"}, {"type": "text", "text": "wind"}],
        },
        said(call(""), reasoning_content="Once more."),
        {"role": "tool", "content": ""},
        {"role": "assistant", "content": "Rain.", "tool_calls": [], "reasoning": "", "reasoning_content": None},
    ]
    async with client(worker()) as asks:
        messages = (await shown(asks, messages=turns))["messages"]
    called = {"name": "weather", "arguments": {"place": "Graz"}}
    assert messages == [
        {"role": "user", "content": "Rain?"},
        {
            "role": "assistant",
            "content": "I ask.",
            "thinking": "Hm.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": called},
                {"id": "call_2", "type": "function", "function": {"name": "weather", "arguments": {"place": "Linz"}}},
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        {"role": "tool", "tool_call_id": "call_2", "name": "weather", "content": "sun\nwind"},
        {
            "role": "assistant",
            "content": "",
            "thinking": "Once more.",
            "reasoning_content": "Once more.",
            "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": {}}}],
        },
        {"role": "tool", "content": ""},
        {"role": "assistant", "content": "Rain."},
    ]


NAMED = {"type": "function", "function": {"name": "weather"}}
NOW = {"type": "function", "function": {"name": "now"}}
CHOICES: list[tuple[dict[str, Any], list[str], bool]] = [
    ({"tool_choice": "required"}, ["weather", "now"], False),
    ({"tool_choice": "required", "parallel_tool_calls": False}, ["weather", "now"], True),
    ({"tool_choice": NAMED}, ["weather"], True),
    (
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NOW]}}},
        ["now"],
        False,
    ),
]


@pytest.mark.parametrize(("body", "names", "is_single"), CHOICES, ids=str)
async def test_a_choice_of_tools_reaches_the_worker_as_a_grammar(
    body: dict[str, Any], names: list[str], is_single: bool
) -> None:
    able = worker()
    async with client(able) as asks:
        told = (await shown(asks, tools=[*TOOLS, NOW], **body))["tools"]
    (submit,) = able.submits
    (calls,) = json.loads(able.grammars[submit.work.grammar.digest].text)["format"]["elements"]
    assert [tag["begin"] for tag in calls["tags"]] == [
        f'<tool_call>\n{{"name": "{name}", "arguments": ' for name in names
    ]
    assert (calls["at_least_one"], calls["stop_after_first"]) == (True, is_single)
    assert [one["function"]["name"] for one in told] == (["now"] if names == ["now"] else ["weather", "now"])


async def test_a_strict_tool_constrains_the_calls_of_a_free_answer() -> None:
    able, strict = worker(), {"type": "function", "function": {**WEATHER, "strict": True}}
    async with client(able) as asks:
        await shown(asks, tools=[strict, NOW])
    (submit,) = able.submits
    (free,) = json.loads(able.grammars[submit.work.grammar.digest].text)["format"]["elements"]
    assert (free["type"], free["triggers"]) == ("triggered_tags", ["<tool_call>"])
    assert [tag["content"].get("strict", True) for tag in free["tags"]] == [True, False]


async def test_a_router_that_enforces_calls_constrains_every_answer_with_tools() -> None:
    able = worker()
    async with client(able, enforces_calls=True) as asks:
        await shown(asks, tools=TOOLS)
        await asks.answer(PATH, messages=CHAT, max_tokens=1)
        await asks.answer(PATH, messages=CHAT, tools=TOOLS, tool_choice="none", max_tokens=1)
    with_tools, *others = able.submits
    (free,) = json.loads(able.grammars[with_tools.work.grammar.digest].text)["format"]["elements"]
    assert (free["type"], [tag["content"]["strict"] for tag in free["tags"]]) == ("triggered_tags", [False])
    assert not any(other.work.HasField("grammar") for other in others)
    async with client(worker(capabilities=[]), enforces_calls=True) as asks:
        error = await asks.refusal(PATH, messages=CHAT, tools=TOOLS)
    assert "grammars" in error["message"]


async def test_a_schema_for_the_text_goes_with_tools() -> None:
    able = worker()
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    async with client(able) as asks:
        await asks.answer(PATH, messages=CHAT, tools=TOOLS, response_format=form, max_tokens=1)
    (submit,) = able.submits
    (either,) = json.loads(able.grammars[submit.work.grammar.digest].text)["format"]["elements"]
    calls, text = either["elements"]
    assert (either["type"], calls["type"], text["json_schema"]) == ("or", "tags_with_separator", {"type": "object"})


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "a tool of another kind": ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search' is not supported"),
    "a tool of a name alone": ({"tools": [{"type": "function"}]}, "tools[0].function", "field required"),
    "a tool without a name": ({"tools": [{**TOOLS[0], "function": {"name": ""}}]}, "tools[0].function.name", "1"),
    "a strictness in words": (
        {"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]},
        "tools[0].function.strict",
        "valid boolean",
    ),
    "a choice that is a number": ({"tool_choice": 1}, "tool_choice", "valid string"),
    "a field of a function": (
        {"tools": [{"type": "function", "function": {"name": "f", "mood": 1}}]},
        "tools[0].function.mood",
        "is not a known field",
    ),
    "too many tools": ({"tools": TOOLS * 1025}, "tools", "1024"),
    "a choice of nothing": ({"tools": TOOLS, "tool_choice": ""}, "tool_choice", "must be 'auto'"),
    "a choice without a type": ({"tools": TOOLS, "tool_choice": {}}, "tool_choice", "must be 'auto'"),
    "a required call without tools": ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
    "a function that is no tool": (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "now"}}},
        "tool_choice",
        "is none of the tools",
    ),
    "a function without a name": ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice", "has a name"),
    "allowed tools of no mode": (
        {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice", "must be 'auto'"
    ),
    "an allowed tool that there is not": (
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOLS[0]]}}},
        "tool_choice",
        "none of the tools",
    ),
    "structural tags beside tools": (
        {"tools": TOOLS, "response_format": {"type": "structural_tag", "triggers": ["<"], "structures": []}},
        "response_format",
        "a request with tools cannot have structural tags",
    ),
    "functions": ({"functions": [WEATHER]}, "functions", "replaced it by tools"),
    "function_call": ({"function_call": "auto"}, "function_call", "replaced it by tools"),
    "documents that are texts": ({"documents": ["a"]}, "documents[0]", ""),
}  # fmt: skip

REFUSED_MESSAGES: dict[str, tuple[dict[str, Any], str, str]] = {
    "a function's result": ({"role": "function", "name": "f", "content": "1"}, "role", "replaced it by tools"),
    "a function_call": ({"role": "assistant", "function_call": {"name": "f"}}, "function_call", "replaced it by tools"),
    "a call of another kind": (
        said({"id": "1", "type": "custom", "custom": {"name": "f", "input": ""}}),
        "tool_calls[0].type",
        "'custom' is not supported",
    ),
    "a call of a name alone": (said(call(), {"id": "1", "type": "function"}), "tool_calls[1].function", "required"),
    "a call by a user": ({**said(call()), "role": "user"}, "tool_calls", "only allowed in messages of 'assistant'"),
    "a user's reasoning": ({"role": "user", "content": "a", "reasoning": "b"}, "reasoning", "'assistant'"),
    "a user's result": ({"role": "user", "content": "a", "tool_call_id": "b"}, "tool_call_id", "'tool'"),
    "arguments as an object": (
        said(call({"place": "Graz"})),  # type: ignore[arg-type]
        "tool_calls[0].function.arguments",
        "valid string",
    ),
    "arguments that are no JSON": (
        said(call(), call('{"place": '), content="I ask.", reasoning="Hm."),
        "tool_calls[1].function.arguments",
        "must be a JSON object",
    ),
    "half a surrogate pair": (
        said(call(r'{"a": "\ud83d"}')),
        "tool_calls[0].function.arguments",
        "has the escape of half a surrogate pair",
    ),
    "arguments that are no object": (said(call("[1]")), "tool_calls[0].function.arguments", "must be a JSON object"),
    "a part whose text is a number": (
        {"role": "user", "content": [{"type": "text", "text": 5}]},
        "content[0].text",
        "valid string",
    ),
    "a part without a text": ({"role": "user", "content": [{"type": "text"}]}, "content[0].text", "is missing"),
    "a part without a refusal": (
        {"role": "assistant", "content": [{"type": "refusal"}]},
        "content[0].refusal",
        "is missing",
    ),
    "a content that is a number": ({"role": "user", "content": 5}, "content", "valid list"),
    "a result that is an image": (
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        "content[0].image_url",
        "is not supported",
    ),
}


async def test_what_is_not_served_is_refused_by_the_name_that_the_client_gave_it() -> None:
    async with client(worker(answer=1)) as asks:
        for name, (body, param, why) in REFUSED.items():
            error = await asks.refusal(PATH, **{"messages": CHAT, **body})
            assert (error["param"], error["type"]) == (param, "invalid_request_error"), name
            assert re.match(f"{re.escape(param)}: .*{re.escape(why)}", error["message"]), (name, error)
        for name, (message, field, why) in REFUSED_MESSAGES.items():
            for path in (PATH, "/tokenize"):
                error = await asks.refusal(path, messages=[*CHAT, message])
                param = f"messages[1].{field}"
                assert error["param"] == param, (name, error)
                assert re.match(f"{re.escape(param)}: .*{re.escape(why)}", error["message"]), (name, error)
        for number in ("1e999", "-1e999"):
            tool = {"type": "function", "function": {"name": "f", "parameters": {"maximum": "NUMBER"}}}
            text = json.dumps({"model": "tiny", "messages": CHAT, "tools": [tool]}).replace('"NUMBER"', number)
            refused = await asks.post(PATH, text.encode())
            assert refused.json()["error"]["param"] == "tools[0].function.parameters"


async def test_a_template_without_a_place_for_tools_refuses_them_by_name() -> None:
    async with client(worker("{{ messages[0].content }}", answer=1)) as asks:
        error = await asks.refusal(PATH, messages=CHAT, tools=TOOLS)
        assert (error["param"], error["message"]) == (
            "tools",
            "tools: the model's chat template has no place for tools",
        )
        error = await asks.refusal(PATH, messages=[*CHAT, said(call())])
        assert error["param"] == "messages"


async def test_effort_and_documents_are_given_to_the_template() -> None:
    documents = [{"title": "a", "text": "b"}]
    async with client(worker()) as asks:
        given = await shown(asks, reasoning_effort="low", documents=documents)
        assert (given["effort"], given["documents"]) == ("low", documents)
        given = await shown(asks, reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"})
        assert given["effort"] == "high"
    async with client(worker("{{ messages[0].content }}", answer=1)) as asks:
        assert (await asks.refusal(PATH, messages=CHAT, documents=documents))["param"] == "documents"
        await asks.answer(PATH, messages=CHAT, documents=[])


@pytest.mark.parametrize("name", ["enable_thinking", "thinking"])  # Qwen3's, and that of DeepSeek V3.1 and Granite
async def test_an_effort_turns_thinking_on_where_a_template_has_no_levels(name: str) -> None:
    template = "{{ {'thinks': " + name + "|default(none)}|tojson }}"
    off = {name: False}
    async with client(worker(template)) as asks:
        for body, thinks in (
            ({}, None),
            ({"reasoning_effort": "low"}, True),
            ({"reasoning_effort": "none"}, False),
            ({"reasoning_effort": "high", "chat_template_kwargs": off}, False),
        ):
            assert (await shown(asks, **body))["thinks"] is thinks


async def test_the_history_of_a_long_task_is_accepted() -> None:
    """1,700 calls, each with reasoning, a text and a result in parts."""
    text = [{"type": "text", "text": "x"}]
    turns: list[Any] = [*CHAT]
    for _ in range(1700):
        turns += [said(call(), content=text, reasoning="Hm."), {"role": "tool", "tool_call_id": "1", "content": text}]
    async with client(worker("{{ messages[:9]|tojson }}{# tool #}", answer=1)) as asks:
        await asks.answer(PATH, messages=turns)
        error = await asks.refusal(PATH, messages=[{"role": "user", "content": text * 8193}])
        assert error["param"] == "messages"
