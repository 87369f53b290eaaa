"""Conversations with tools and reasoning: a template gets what transformers would give it, or the part is refused by
name."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.router.cluster import cluster, refusal
from tests.router.fake_worker import FakeWorker
from tests.router.prompts.tool_templates import ALL, TAGGED, TEMPLATES
from tests.router.tokenizer_files import CHAT_TEMPLATE, byte_tokenizer, tokenizer_files
from trunkline.client.client_requests import generate_request, tokenize_request
from trunkline.status import RequestRefused
from trunkline.v1.fleet_pb2 import ExplainRouteRequest
from trunkline.v1.generation_pb2 import ToolCall
from trunkline.v1.inference_pb2 import (
    ChatMessage,
    ChatMessages,
    ChatPart,
    GenerateRequest,
    Image,
    TokenizeRequest,
    Tool,
    ToolResult,
)
from trunkline_router.prompts.chat_template import ChatTemplate
from trunkline_router.prompts.conversation import MAX_PARTS, MAX_SCHEMA, MAX_TOOLS, template_messages

SPECIAL: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}

WORDS = st.sampled_from(["", "hi", " two words\n", "Grüße 🦊", '"quoted" <b>', "</tool_call>", "{}"])
NAMES = st.sampled_from(["get_weather", "mcp.search-2", "f"])
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(-1e9, 1e9), WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.sampled_from(["city", "näme", "b", "a"]), VALUES, max_size=3)
CALLS = st.builds(
    lambda name, arguments, number: {
        "id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": arguments}
    },
    NAMES, OBJECTS, st.integers(0, 99999),
)  # fmt: skip


def _assistant(content: str, calls: list[Any], reasoning: str) -> dict[str, Any]:
    made: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        made["reasoning_content"] = reasoning
    return made | ({"tool_calls": calls} if calls else {})


def _result(content: str, number: int, name: str | None) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": f"call{number:05}"} | ({"name": name} if name else {})


MESSAGES = st.lists(
    st.one_of(
        st.builds(lambda role, content: {"role": role, "content": content}, st.sampled_from(["system", "user"]), WORDS),
        st.builds(_assistant, WORDS, st.lists(CALLS, max_size=3), WORDS),
        st.builds(_result, WORDS, st.integers(0, 99999), st.none() | NAMES),
    ),
    min_size=1,
    max_size=6,
)
FUNCTIONS = st.builds(
    lambda name, described, schema: {"name": name} | described | schema,
    NAMES,
    st.just({}) | WORDS.filter(bool).map(lambda text: {"description": text}),
    st.just({}) | OBJECTS.map(lambda schema: {"parameters": schema}),
)
TOOLS = st.lists(FUNCTIONS.map(lambda function: {"type": "function", "function": function}), max_size=3)


def contract_tool(tool: dict[str, Any]) -> Tool:
    function = tool["function"]
    schema = json.dumps(function["parameters"]) if "parameters" in function else ""
    return Tool(name=function["name"], description=function.get("description", ""), parameters=schema)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_gets_what_transformers_gives_it(name: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    @settings(max_examples=80, deadline=None, derandomize=True)
    @given(MESSAGES, TOOLS, st.lists(OBJECTS, max_size=2))
    def compare(messages: list[Any], tools: list[Any], documents: list[Any]) -> None:
        chat = tokenize_request(messages, model="", special_tokens=True).chat
        chat.tools.extend(map(contract_tool, tools))
        if name == "quoting":
            chat.documents = json.dumps(documents)
        try:
            ours = ChatTemplate(TEMPLATES[name], SPECIAL).render(chat)
        except RequestRefused:
            ours = None
        try:
            rendered: Any = render_jinja_template(
                [messages],
                tools=tools or None,
                documents=(documents or None) if name == "quoting" else None,
                chat_template=TEMPLATES[name],
                add_generation_prompt=True,
                **SPECIAL,
            )
            theirs = rendered[0][0]
        except Exception:  # the template refuses the conversation
            theirs = None
        if theirs is None and name == "typed":
            return  # it refuses tools and messages that it gets in another style here (test_tool_styles.py)
        if name != "by id" or not tools:  # it has no place for tools: transformers leaves them out
            assert ours == theirs

    compare()


def parts(*made: ChatPart, role: str = "assistant") -> ChatMessage:
    return ChatMessage(role=role, parts=made)


def call(arguments: str = "{}", name: str = "f") -> ChatPart:
    return ChatPart(tool_call=ToolCall(id="1", name=name, arguments=arguments))


def result(content: str = "", *made: ChatPart) -> ChatPart:
    return ChatPart(tool_result=ToolResult(call_id="1", content=content, parts=made))


TEXT, THOUGHT, IMAGE = ChatPart(text="t"), ChatPart(reasoning="r"), ChatPart(image=Image(data=b"x"))


def test_results_become_messages_of_their_own_before_the_texts_of_a_turn() -> None:
    made = template_messages([parts(TEXT, result("a"), ChatPart(text="u"), result("", TEXT, TEXT), role="user")])
    assert made == [
        {"role": "tool", "content": "a", "tool_call_id": "1"},
        {"role": "tool", "content": "t\nt", "tool_call_id": "1"},
        {"role": "user", "content": "t\nu"},
    ]


@pytest.mark.parametrize("content", ["", "t", "t\nu"])
def test_content_is_short_for_parts_of_text(content: str) -> None:
    as_parts = parts(*(ChatPart(text=text) for text in content.split("\n")), role="user")
    short = ChatMessages(messages=[ChatMessage(role="user", content=content)])
    assert ChatTemplate(ALL, {}).render(ChatMessages(messages=[as_parts])) == ChatTemplate(ALL, {}).render(short)


def test_arguments_are_an_object_in_their_order_and_need_not_be_given() -> None:
    for given_arguments, expected in (("", {}), ('{"b": 1, "a": [null]}', {"b": 1, "a": [None]})):
        [message] = template_messages([parts(call(given_arguments))])
        assert message["content"] == ""
        arguments = message["tool_calls"][0]["function"]["arguments"]
        assert list(arguments.items()) == list(expected.items())


WRONG: dict[str, tuple[ChatMessage, str]] = {
    "content beside parts": (ChatMessage(role="user", content="x", parts=[TEXT]), "content"),
    "no kind": (parts(TEXT, ChatPart()), "parts[1]"),
    "a later kind": (parts(ChatPart.FromString(b"\xfa\x07\x00")), "parts[0]"),
    "an image": (parts(TEXT, IMAGE, role="user"), "parts[1].image"),
    "an image in a result": (parts(result("", TEXT, IMAGE), role="user"), "parts[0].tool_result.parts[1].image"),
    "a user's call": (parts(call(), role="user"), "parts[0].tool_call"),
    "a user's reasoning": (parts(THOUGHT, role="user"), "parts[0].reasoning"),
    "an assistant's result": (parts(result("x")), "parts[0].tool_result"),
    "content beside parts of a result": (parts(result("x", TEXT), role="tool"), "parts[0].tool_result.content"),
    "a result in a result": (parts(result("", result("x")), role="tool"), "parts[0].tool_result.parts[0].tool_result"),
    "a call without a name": (parts(call(name="")), "parts[0].tool_call.name"),
    "arguments that are no JSON": (parts(call("{")), "parts[0].tool_call.arguments"),
    "arguments that are a list": (parts(call("[]")), "parts[0].tool_call.arguments"),
    "arguments that are a text": (parts(call('"{}"')), "parts[0].tool_call.arguments"),
    "arguments that JSON does not have": (parts(call('{"a": NaN}')), "parts[0].tool_call.arguments"),
    "arguments of great depth": (parts(call('{"a":' + "[" * 100_000)), "parts[0].tool_call.arguments"),
    "arguments with a long number": (
        parts(call('{"a":' + "9" * 5000 + "}")),
        "parts[0].tool_call.arguments",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_breaks_a_rule_is_refused_by_its_name(name: str) -> None:
    message, field = WRONG[name]
    with pytest.raises(RequestRefused) as caught:
        template_messages([ChatMessage(role="user", content="x"), message])
    assert (caught.value.reason, caught.value.field) == ("INVALID_REQUEST", f"chat.messages[1].{field}")


@pytest.mark.parametrize(
    ("tool", "field"),
    [
        (Tool(), "name"),
        (Tool(name="f", parameters="[]"), "parameters"),
        (Tool(name="f", parameters="{}".ljust(MAX_SCHEMA + 1)), "parameters"),
    ],
)
def test_a_tool_that_breaks_a_rule_is_refused_by_its_name(tool: Tool, field: str) -> None:
    chat = ChatMessages(messages=[ChatMessage(role="user", content="x")], tools=[Tool(name="g"), tool])
    with pytest.raises(RequestRefused) as caught:
        ChatTemplate(ALL, {}).render(chat)
    assert (caught.value.reason, caught.value.field) == ("INVALID_REQUEST", f"chat.tools[1].{field}")


def test_a_conversation_has_as_many_parts_and_tools_as_it_may_have() -> None:
    half = MAX_PARTS // 2
    most = [parts(result("", *[TEXT] * (half - 1)), role="tool"), parts(*[TEXT] * half)]
    assert len(template_messages(most)) == 2
    with pytest.raises(RequestRefused, match=f"more than {MAX_PARTS} parts"):
        template_messages([*most, parts(TEXT)])
    tools = [Tool(name="f", parameters="{}".ljust(MAX_SCHEMA)), *[Tool(name="f")] * (MAX_TOOLS - 1)]
    ChatTemplate(ALL, {}).render(ChatMessages(messages=[ChatMessage(role="user")], tools=tools))
    with pytest.raises(RequestRefused, match=f"more than {MAX_TOOLS}"):
        ChatTemplate(ALL, {}).render(ChatMessages(messages=[ChatMessage(role="user")], tools=[*tools, tools[0]]))


def test_a_template_without_a_place_for_tools_refuses_them_by_name() -> None:
    template = ChatTemplate(CHAT_TEMPLATE, SPECIAL)
    said = ChatMessage(role="user", content="x")
    for chat, field in (
        (ChatMessages(messages=[said], tools=[Tool(name="f")]), "chat.tools"),
        (ChatMessages(messages=[said, parts(call())]), "chat.messages"),
    ):
        with pytest.raises(RequestRefused, match="has no place for") as caught:
            template.render(chat)
        assert caught.value.field == field


def test_only_a_final_message_that_ends_with_text_is_continued() -> None:
    def continued(*of_final: ChatPart) -> str:
        messages = [ChatMessage(role="user", content="x"), parts(*of_final)]
        return ChatTemplate(TAGGED, SPECIAL).render(ChatMessages(messages=messages, continue_final_message=True))

    assert continued(TEXT, ChatPart(text="u")).endswith("<|im_start|>assistant\nt\nu")
    assert continued(THOUGHT, TEXT).endswith(f"<|im_start|>assistant\n<think>\n{THOUGHT.reasoning}\n</think>\nt")
    for refused in ([THOUGHT], [TEXT, THOUGHT], [TEXT, call()], [call(), TEXT]):
        with pytest.raises(RequestRefused, match="ends with text and calls no tools"):
            continued(*refused)


QUESTION: list[Any] = [
    {"role": "user", "content": [{"type": "text", "text": "Weather in"}, {"type": "text", "text": "Köln?"}]},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "I look it up.",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "rain"},
]
RENDERED = """<|im_start|>user
Weather in
Köln?<|im_end|>
<|im_start|>assistant
<think>
I look it up.
</think>
<tool_call>
{"name": "weather", "arguments": {"city": "Köln"}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
rain
</tool_response><|im_end|>
<|im_start|>assistant
"""


async def test_a_worker_gets_the_prompt_of_a_conversation_with_tools() -> None:
    expected = byte_tokenizer().encode(RENDERED, add_special_tokens=False).ids
    worker = FakeWorker("a", files=tokenizer_files(chat_template=TAGGED), context_length=4096, kv_token_capacity=4096)
    request = generate_request(QUESTION, model="", n=None, request_id="", lane=None)
    async with cluster(worker) as router:
        [_ async for _ in router.stub.Generate(request)]
        assert list(worker.submits[0].prompt_token_ids) == expected
        tokenized = await router.stub.Tokenize(TokenizeRequest(chat=request.chat))
        assert list(tokenized.token_ids) == expected
        explained = await router.fleet.ExplainRoute(ExplainRouteRequest(request=request))
        assert explained.prompt_tokens == len(expected)
        wrong = GenerateRequest(chat=ChatMessages(messages=[*request.chat.messages, parts(call("[1"))]))
        for method, refused in (
            (router.stub.Generate, wrong),
            (router.stub.Tokenize, TokenizeRequest(chat=wrong.chat)),
            (router.fleet.ExplainRoute, ExplainRouteRequest(request=wrong)),
        ):
            found = await refusal(method(refused))
            assert (found.reason, found.field) == ("INVALID_REQUEST", "chat.messages[3].parts[0].tool_call.arguments")


SAID = ChatMessage(role="user", content="x")
QUOTED = "{% for document in documents or [] %}[{{ document.title }}]{% endfor %}{{ messages[0].content }}"


def test_a_template_quotes_the_documents_of_a_conversation() -> None:
    chat = ChatMessages(messages=[SAID], documents='[{"title": "a"}, {"title": "b"}]')
    assert ChatTemplate(QUOTED, {}).render(chat) == "[a][b]x"
    for none in ("", "[]"):
        assert (
            ChatTemplate("{{ documents is none }}", {}).render(ChatMessages(messages=[SAID], documents=none)) == "True"
        )
    with pytest.raises(RequestRefused, match="has no place for documents") as caught:
        ChatTemplate(ALL, {}).render(chat)
    assert caught.value.field == "chat.documents"


@pytest.mark.parametrize("documents", ["{}", "[1]", '["a"]', "[{}", "null", "[" * 100_000])
def test_documents_are_an_array_of_objects(documents: str) -> None:
    with pytest.raises(RequestRefused, match="must be a JSON array of objects") as caught:
        ChatTemplate(QUOTED, {}).render(ChatMessages(messages=[SAID], documents=documents))
    assert caught.value.field == "chat.documents"


def test_an_effort_sets_variables_and_those_of_the_client_precede_it() -> None:
    template = ChatTemplate("{{ reasoning_effort }} {{ enable_thinking }} {{ thinking }}{# content #}", {})
    for effort, thinks in (("high", True), ("none", False)):
        chat = ChatMessages(messages=[SAID], reasoning_effort=effort)
        assert template.render(chat) == f"{effort} {thinks} {thinks}"
        chat.template_variables = json.dumps({"thinking": 1, "reasoning_effort": "low"})
        assert template.render(chat) == f"low {thinks} 1"
    assert template.render(ChatMessages(messages=[SAID])) == "  "
