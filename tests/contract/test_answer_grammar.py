"""Grammars of answers: the parser of the format reads what they allow, and what cannot be enforced is refused."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from tests.contract.call_grammars import (
    NOW,
    PATCH_TOOL,
    STYLES,
    TEMPLATES,
    TOOLS,
    UNENFORCED,
    WEATHER,
    grammar_of,
    parsed,
)
from tests.contract.call_writers import WRITERS
from tests.contract.element_writer import Writer
from trunkline.answer.answer_grammar import check_choice
from trunkline.answer.answer_items import REASONING, TEXT, TOOL_CALL, AnswerItem
from trunkline.answer.answer_parser import PARSERS, reasoning_marks
from trunkline.status import RequestRefused
from trunkline.v1.inference_pb2 import ChatMessages, Tool
from trunkline.v1.worker_pb2 import Grammar, GrammarKind

JSON = Grammar(kind=GrammarKind.GRAMMAR_KIND_JSON_SCHEMA, text='{"type": "object", "enum": [{"a": 1}]}')


def check_calls(items: Sequence[AnswerItem], *, kinds: Sequence[str] = (TOOL_CALL,)) -> list[AnswerItem]:
    """Asserts that the calls are whole and conform to their schemas, and returns them."""
    assert {item.kind for item in items} <= {*kinds}
    calls = [item for item in items if item.kind == TOOL_CALL]
    for call in calls:
        schema = {"weather": WEATHER, "time.now": NOW}[call.name]
        assert call.is_complete
        for key, value in json.loads(call.text).items():
            assert value in schema["properties"][key]["enum"]  # type: ignore[index]
    return calls


@pytest.mark.parametrize(("answer_format", "template"), STYLES)
@pytest.mark.parametrize("single", [False, True])
def test_required_calls_are_read_as_they_are_written(answer_format: str, template: str, single: bool) -> None:
    element = grammar_of(answer_format, template, requires_call=True, single_tool_call=single)
    most = 1 if single or answer_format == "harmony" else 3
    numbers = set()
    for seed in range(60):
        items = parsed(answer_format, Writer(seed).of(element))
        calls = check_calls(items, kinds=(TOOL_CALL, REASONING) if answer_format == "harmony" else (TOOL_CALL,))
        numbers.add(len(calls))
    assert numbers == set(range(1, most + 1))


@pytest.mark.parametrize(("answer_format", "template"), STYLES)
def test_a_named_tool_is_called_once_and_no_other(answer_format: str, template: str) -> None:
    element = grammar_of(answer_format, template, called_tool="time.now")
    assert "weather" not in json.dumps(element)
    for seed in range(20):
        text = Writer(seed).of(element)
        (call,) = (item for item in parsed(answer_format, text) if item.kind == TOOL_CALL)
        assert (call.name, call.text, call.is_complete) == ("time.now", "{}", True)


@pytest.mark.parametrize(("answer_format", "template"), STYLES)
@pytest.mark.parametrize("single", [False, True])
def test_the_calls_of_a_strict_tool_conform_wherever_they_begin(
    answer_format: str, template: str, single: bool
) -> None:
    strict = [Tool(name=tool.name, parameters=tool.parameters, strict=True) for tool in TOOLS]
    element = grammar_of(answer_format, template, tools=strict, single_tool_call=single)
    starts = answer_format in ("llama3_json", "pythonic")  # their calls are a whole answer
    kinds = set()
    for seed in range(60):
        items = parsed(answer_format, Writer(seed, text="" if starts else "so, ").of(element))
        calls = check_calls(items, kinds=(TOOL_CALL, REASONING, TEXT))
        assert len(calls) <= 1 if single else 3
        kinds |= {item.kind for item in items}
    assert kinds >= ({TOOL_CALL} if starts else {TOOL_CALL, TEXT})


# Calls of `pythonic` are enforced as JSON.
@pytest.mark.parametrize("answer_format", [name for name in PARSERS if name not in (*UNENFORCED, "pythonic")])
def test_the_style_is_that_of_the_models(answer_format: str) -> None:
    """What tests of the parsers let models write is among what a grammar allows, but for line breaks."""
    template = dict(TEMPLATES).get(answer_format, "")
    element = grammar_of(answer_format, template, called_tool="time.now")
    allowed = [Writer(seed).of(element).replace("\n", "") for seed in range(60)]
    written = WRITERS[answer_format]([("time.now", {})]).replace("\n", "")
    assert written.removesuffix("<|call|>") in allowed  # which ends an answer of gpt-oss


def test_a_free_answer_with_strict_tools_may_begin_with_reasoning() -> None:
    """The marks may be tokens, which free text does not have."""
    strict = [Tool(name="f", strict=True)]
    reasoning, free = grammar_of("hermes", "<think></think>", "assistant\n", tools=strict)["elements"]
    assert (reasoning["type"], free["type"]) == ("optional", "triggered_tags")
    assert reasoning["content"]["elements"][0]["end"] == "</think>"


@pytest.mark.parametrize("answer_format", [*PARSERS, ""])
def test_the_grammar_of_a_text_is_enforced_where_it_can_be_and_told_elsewhere(answer_format: str) -> None:
    template = dict(TEMPLATES).get(answer_format, "")
    element = grammar_of(answer_format, template, tools=[*TOOLS, PATCH_TOOL])
    assert (element is None) == (answer_format in (*UNENFORCED, ""))
    assert element is None or r"Begin\\x20Patch" in json.dumps(element)
    for text in ("start: start", "a: /b/", "start: /b/i"):
        grammar = Grammar(kind=GrammarKind.GRAMMAR_KIND_LARK, text=text)
        tools = [*TOOLS, Tool(name="f", input_grammar=grammar)]
        element = grammar_of(answer_format, template, tools=tools)
        assert (element is None) == (answer_format in (*UNENFORCED, ""))
        assert '"input"' not in json.dumps(element)
        with pytest.raises(RequestRefused) as refused:
            grammar_of(answer_format, template, tools=tools, requires_call=True)
        is_known = answer_format not in (*UNENFORCED, "")
        assert refused.value.field == ("chat.tools[2].input_grammar" if is_known else "chat.requires_call")


def test_the_grammars_of_a_request_are_together_as_long_as_one_may_be() -> None:
    grammar = Grammar(kind=GrammarKind.GRAMMAR_KIND_LARK, text='start: "a" //' + "b" * 10_000)
    tools = [Tool(name=name, input_grammar=grammar) for name in ("f", "g")]
    assert grammar_of("hermes", tools=tools[:1]) is not None
    assert grammar_of("hermes", tools=tools) is None
    with pytest.raises(RequestRefused, match="the grammars have more than 16384 characters"):
        grammar_of("hermes", tools=tools, requires_call=True)


def test_without_a_strict_tool_or_a_choice_calls_are_free() -> None:
    assert grammar_of("hermes") is None
    assert grammar_of("hermes", tools=[]) is None


THOUGHT = [
    ("hermes", "<think>", "</think>"),
    ("mistral", "[THINK]", "[/THINK]"),
    ("qwen_xml", "<think>", "</think>"),
    ("deepseek_v3", "<think>", "</think>"),
    ("kimi_k2", "<think>", "</think>"),
]


@pytest.mark.parametrize(("answer_format", "begin", "end"), THOUGHT)
@pytest.mark.parametrize("wanted", ["call", "json", "either"])
def test_a_constraint_begins_after_the_reasoning(answer_format: str, begin: str, end: str, wanted: str) -> None:
    asks: dict[str, dict[str, Any]] = {
        "call": {"requires_call": True},
        "json": {"tools": [], "grammar": JSON},
        "either": {"grammar": JSON},
    }
    asked = asks[wanted]
    tools = asked.get("tools", TOOLS)
    for prompt_end, template in ((f"assistant\n{begin}\n", ""), ("assistant\n", f"{begin}{end}")):
        element = grammar_of(answer_format, template, prompt_end, **asked)
        seen = set()
        for seed in range(40):
            items = parsed(answer_format, Writer(seed).of(element), prompt_end, tools)
            *thoughts, last = [item for item in items if item.kind != TOOL_CALL or item is items[-1]]
            assert [(one.kind, one.text.strip()) for one in thoughts] in ([], [(REASONING, "so,")])
            assert last.kind == TOOL_CALL or json.loads(last.text) == {"a": 1}
            seen.add((bool(thoughts), last.kind))
        reasons = {True} if begin in prompt_end else {False, True}
        kinds = {"call": {TOOL_CALL}, "json": {TEXT}, "either": {TOOL_CALL, TEXT}}[wanted]
        assert seen == {(one, kind) for one in reasons for kind in kinds}


@pytest.mark.parametrize("prompt_end", ["assistant\n<think>\n\n</think>\n\n", ""])
def test_there_is_no_reasoning_after_a_prompt_that_ends_it_or_is_continued(prompt_end: str) -> None:
    template = "<think></think>"
    assert grammar_of("hermes", template, prompt_end, tools=[], grammar=JSON) is None
    element = grammar_of("hermes", template, prompt_end, called_tool="time.now")
    assert Writer(0).of(element).startswith("<tool_call>")


GIVEN = [
    (GrammarKind.GRAMMAR_KIND_REGEX, "a+", {"type": "regex", "pattern": "a+"}),
    (GrammarKind.GRAMMAR_KIND_LARK, 'start: "a"', {"type": "grammar", "grammar": 'start: "a"'}),
    (GrammarKind.GRAMMAR_KIND_EBNF, 'root ::= "a"', {"type": "grammar", "grammar": 'root ::= "a"'}),
    (GrammarKind.GRAMMAR_KIND_JSON_SCHEMA, "true", {"type": "json_schema", "json_schema": True}),
    (
        GrammarKind.GRAMMAR_KIND_CHOICE,
        '["a", "b"]',
        {"type": "grammar", "grammar": 'start: CHOICE\nCHOICE: "a" | "b"'},
    ),
    (GrammarKind.GRAMMAR_KIND_STRUCTURAL_TAG, '{"format": {"type": "any_text"}}', {"type": "any_text"}),
    (
        GrammarKind.GRAMMAR_KIND_STRUCTURAL_TAG,
        '{"triggers": ["<"], "structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}]}',
        {
            "type": "triggered_tags",
            "triggers": ["<"],
            "tags": [
                {"type": "tag", "begin": "<a>", "content": {"type": "json_schema", "json_schema": {}}, "end": "</a>"}
            ],
        },
    ),
]


@pytest.mark.parametrize(("kind", "text", "element"), GIVEN)
def test_a_grammar_of_any_kind_follows_reasoning(kind: GrammarKind.ValueType, text: str, element: Any) -> None:
    grammar = Grammar(kind=kind, text=text)
    found = grammar_of("hermes", "", "assistant\n<think>\n", grammar, tools=[])
    assert found["elements"][0] == {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "</think>"}
    assert found["elements"][-1] == element
    for plain in ("", "hermes"):  # nothing precedes the text, so the grammar stays as it is
        assert grammar_of(plain, "", "assistant\n", grammar, tools=[]) is None


def test_a_text_of_gpt_oss_is_constrained_in_its_final_message() -> None:
    element = grammar_of("harmony", grammar=JSON)
    seen = set()
    for seed in range(60):
        *thoughts, last = parsed("harmony", Writer(seed).of(element))
        assert {one.kind for one in thoughts} <= {REASONING}
        assert last.kind == TOOL_CALL or json.loads(last.text) == {"a": 1}
        seen.add((bool(thoughts), last.kind))
    assert seen == {(True, TEXT), (False, TEXT), (True, TOOL_CALL), (False, TOOL_CALL)}
    tag = Grammar(kind=GrammarKind.GRAMMAR_KIND_STRUCTURAL_TAG, text='{"format": {"type": "any_text"}}')
    assert grammar_of("harmony", grammar=tag, tools=[]) is None


def test_what_is_no_grammar_is_left_to_the_worker() -> None:
    for text in ("{", "[1", '{"triggers": ["<"]}', "[]"):
        for kind in (GrammarKind.GRAMMAR_KIND_JSON_SCHEMA, GrammarKind.GRAMMAR_KIND_STRUCTURAL_TAG):
            grammar = Grammar(kind=kind, text=text)
            if text != "[]" and not (kind == GrammarKind.GRAMMAR_KIND_JSON_SCHEMA and "triggers" in text):
                assert grammar_of("hermes", "", "<think>", grammar, tools=[]) is None
    for text in ('"ab"', '{"a": 1}', "[]", '["a", ""]', "[1]"):
        grammar = Grammar(kind=GrammarKind.GRAMMAR_KIND_CHOICE, text=text)
        assert grammar_of("hermes", "", "<think>", grammar, tools=[]) is None


REFUSED: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "no format": ("", {"requires_call": True}, "chat.requires_call", "answer format, none"),
    "gemma": ("gemma4", {"called_tool": "weather"}, "chat.called_tool", "answer format, gemma4"),
    "strict gemma": ("gemma4", {"tools": [Tool(name="f", strict=True)]}, "chat.tools", "answer format, gemma4"),
    "a name with a blank": ("hermes", {"tools": [Tool(name="a b")], "requires_call": True}, "chat.tools[0].name", ""),
    "a large number": (
        "hermes",
        {"tools": [Tool(name="f", parameters='{"maximum": 1e999}')], "requires_call": True},
        "chat.tools",
        "out of range",
    ),
    "too much": (
        "hermes",
        {"tools": [Tool(name="f", parameters=json.dumps({"title": "x" * 262_000}))], "requires_call": True},
        "chat.tools",
        "more than 262144",
    ),
    "too deep": (
        "hermes",
        {"tools": [Tool(name="f", parameters='{"a": ' * 3_000 + "1" + "}" * 3_000)], "requires_call": True},
        "chat.tools[0].parameters",
        "too many levels",
    ),
    "too much to read": (
        "hermes",
        {"tools": [Tool(name="f", parameters="{" + '"a": 1, ' * 20_000 + '"a": 1}')] * 2, "requires_call": True},
        "chat.tools",
        "the schemas have",
    ),
}


@pytest.mark.parametrize(("answer_format", "chat", "field", "words"), REFUSED.values(), ids=REFUSED)
def test_calls_that_cannot_be_enforced_are_refused(
    answer_format: str, chat: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(RequestRefused) as refused:
        grammar_of(answer_format, **chat)
    assert refused.value.field == field
    assert words in refused.value.message


def test_a_call_of_no_tool_is_refused() -> None:
    check_choice(ChatMessages(tools=TOOLS, called_tool="weather", requires_call=True))
    check_choice(ChatMessages())
    for chat, field in (
        (ChatMessages(tools=TOOLS, called_tool="f"), "called_tool"),
        (ChatMessages(requires_call=True), "requires_call"),
    ):
        with pytest.raises(RequestRefused) as refused:
            check_choice(chat)
        assert refused.value.field == f"chat.{field}"


REASONING_FORMATS = [name for name in PARSERS if reasoning_marks(name)]


@pytest.mark.parametrize("tools", [[], TOOLS])
@pytest.mark.parametrize("answer_format", REASONING_FORMATS)
def test_reasoning_has_a_limit_and_the_rest_is_free(answer_format: str, tools: Sequence[Tool]) -> None:
    begin, end = next(iter(reasoning_marks(answer_format).items()))
    limited = {"type": "any_text", "max_tokens": 7}
    for limit in (0, 7):
        chat: dict[str, Any] = {"tools": tools, "max_reasoning_tokens": limit}
        thought, *_, rest = grammar_of(answer_format, end, begin, **chat)["elements"]
        expected: dict[str, Any] = {"type": "tag", "begin": "", "content": limited, "end": end}
        assert thought == (expected if limit else {"type": "const_string", "value": end})
        assert rest["type"] == "any_tokens"
        assert rest["exclude_tokens"] in ([], [begin])
        assert grammar_of(answer_format, "a template without marks", **chat) is None


@pytest.mark.parametrize("answer_format", REASONING_FORMATS)
def test_a_limit_of_reasoning_that_the_model_begins_needs_a_mark_that_is_a_token(answer_format: str) -> None:
    begin, end = next(iter(reasoning_marks(answer_format).items()))
    if answer_format in ("gemma4", "kimi_k3"):
        with pytest.raises(RequestRefused) as refused:
            grammar_of(answer_format, end, max_reasoning_tokens=7)
        assert refused.value.field == "chat.max_reasoning_tokens"
        return
    thought, rest = grammar_of(answer_format, end, max_reasoning_tokens=7)["elements"]
    assert thought["type"] == "optional"
    assert rest == {"type": "any_tokens", "exclude_tokens": [begin]}


def test_a_limit_leaves_gpt_oss_one_message_of_reasoning() -> None:
    messages = grammar_of("harmony", tools=[], max_reasoning_tokens=7)["elements"]
    assert [each["type"] for each in messages] == ["optional", "optional", "sequence"]
    for answer in ("<|channel|>analysis<|message|>so, <|end|><|start|>assistant", ""):
        items = parsed("harmony", f"{answer}<|channel|>final<|message|>so, ", tools=[])
        assert [item.kind for item in items] == ([REASONING, TEXT] if answer else [TEXT])
    tag = Grammar(kind=GrammarKind.GRAMMAR_KIND_STRUCTURAL_TAG, text='{"format": {"type": "any_text"}}')
    with pytest.raises(RequestRefused) as refused:
        grammar_of("harmony", grammar=tag, tools=[], max_reasoning_tokens=7)
    assert refused.value.field == "chat.max_reasoning_tokens"
