"""The parsers of answers, with the fixtures of canitoolcall and with random outputs."""

import json
import os
import random
import re
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
from canitoolcall.checks import case_status
from canitoolcall.fixtures import load_families, load_fixtures
from canitoolcall.results import Status
from pydantic_core import from_json

from tests.contract.tool_calls import judged
from tests.tagged_answers import answer_parts, joined
from trunkline.answer import output_reader
from trunkline.answer.answer_parser import PARSERS
from trunkline.answer.harmony import Harmony
from trunkline.answer.json_calls import SectionParser
from trunkline.answer.json_reader import MAX_DEPTH
from trunkline.answer.marked_parser import MarkedParser
from trunkline.answer.output_reader import MAX_HEAD, AnswerContext, OutputReader
from trunkline.answer.xml_calls import AttributesParser
from trunkline.v1.generation_pb2 import FinishReason, ToolCall
from trunkline.v1.inference_pb2 import AnswerPart, ChatMessages, Tool, ToolCallEnd

MEGABYTE = 1 << 20
QUARTER = MEGABYTE // 4
LONGEST_S = 3.0  # of a megabyte: 0.25 s on a fast processor, 1.2 s on a slow and busy one; of a schema: less
TRIES = 3  # of a comparison of times, which another process may disturb
MANY = int(os.environ.get("TRUNKLINE_FUZZ_OUTPUTS", "5000"))  # random outputs of a format
STOP, LENGTH = FinishReason.FINISH_REASON_STOP, FinishReason.FINISH_REASON_LENGTH
FAMILIES = load_families()
# It wants white space before a call left out; gemma4/sglang-text-before-call wants it kept.
CONTRADICTED = {"gemma4/vllm-text-before-call"}
SCHEMA = '{"properties": {"a": {"type": "string"}, "b": {"type": ["integer", "null"]}, "c": {"type": "object"}}}'
MAX_TOOLS = 1024  # of a request
B_IS = "<function=f><parameter=b>{}</parameter></function>"
TOOLS = [Tool(name="f", parameters=SCHEMA), Tool(name="g")]
COMMON = ["\n", " ", "{", "}", "[", "]", '"', "'", ",", ":", "\\", "<", ">", "x", "ä🦊", "f", "f(a='1')", "\x00", "u12"]
JSON = [
    '{"name": "f", "arguments": {"a": "x}<\\"\\n"}}',
    '{"name": "f", "parameters": {"b": [1, {}, null]}}',
    '{"arguments": {"a": 1}, "name": "g"}',
    '{"id": "\\ud800", "name": "f", "arguments": "{\\"\\\\ud83d\\": \\"\\ud83d\\"}"}',
    '{"name": "f", "arguments": ',
    '{"a": "1", "b": 2}',
    '"id": "own", ',
    "\\ud83d",
]
OWN = {  # what stands between the marks of a format
    "deepseek_dsml": [
        *(f"<｜DSML｜{tag}>" for tag in ('invoke name="f"', 'parameter name="a" string="true"', 'parameter name="b"')),
        *(f"</｜DSML｜{tag}>" for tag in ("invoke", "parameter", "function_calls", "tool_calls")),
        '<｜DSML｜ invoke name="g">',
        "</｜DSML｜ invoke>",
        "</｜DSML｜ calls>",
    ],
    "deepseek_v3": [
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n",
        "\n```",
        "<｜tool▁sep｜>",
        "f<｜tool▁sep｜>",
    ],
    "gemma4": ["call:f{", 'a:<|"|>', '<|"|>', "b:1e5,", "key x:[1,", "call:g{}"],
    "glm": ["f<arg_key>", "<arg_key>a", "</arg_key><arg_value>", "</arg_value>", "b</arg_key>"],
    "harmony": [
        "<|channel|>analysis",
        "<|channel|>commentary to=functions.f",
        "<|channel|>final",
        " to=functions.g",
        "<|message|>",
        "<|end|>",
        "<|call|>",
        "<|return|>",
        "<|start|>assistant",
        "<|constrain|>json",
        " to=python",
    ],
    "kimi_k2": [
        "functions.f:0",
        "<|tool_call_argument_begin|>",
        "<|tool_call_begin|>g:1<|tool_call_argument_begin|>{}",
    ],
    "kimi_k3": [
        '<|open|>call tool="f"<|sep|>',
        '<|open|>argument key="a" type="string"<|sep|>',
        '<|open|>argument key="b&amp;" type="number"<|sep|>',
        "<|close|>argument<|sep|>",
        "<|close|>call<|sep|>",
        "<|close|>tools<|sep|>",
    ],
    "llama3_json": [";"],
    "mistral": ["f[ARGS]", "[CALL_ID]", "[ARGS]", "g[CALL_ID]abc[ARGS]{}"],
    "pythonic": ["[f(a='x\\'')]", "[f(b=[1, {'a': None}]), g()]", "[", "f(", ")"],
    "qwen_xml": ["f>", "<parameter=a>", "<parameter=b>\n", "\n</parameter>", "</parameter>", "</function>"],
}


def context(tools: Sequence[Tool] = TOOLS, prompt_end: str = "") -> AnswerContext:
    return AnswerContext(tools, prompt_end, new_call_id=lambda: "call")


def kind_of(name: str) -> type[MarkedParser]:
    kind = PARSERS[name]
    assert isinstance(kind, type)
    assert issubclass(kind, MarkedParser)
    return kind


def parsed(name: str, outputs: Sequence[str], reason: "FinishReason.ValueType", of: AnswerContext) -> list[AnswerPart]:
    return joined(answer_parts(PARSERS[name](of), outputs, reason))


def outputs_of(name: str, pieces: Sequence[str], num: int) -> Iterator[tuple[str, random.Random]]:
    for seed in range(num):
        chance = random.Random(f"{name} {seed}")
        yield "".join(chance.choices(pieces, k=chance.randint(1, 14))), chance


def cut(output: str, chance: random.Random) -> list[str]:
    places = sorted([0, len(output), *(chance.randint(0, len(output)) for _ in range(chance.randint(0, 9)))])
    return [output[start:end] for start, end in pairwise(places)]


def check_cuts(name: str, num: int) -> None:
    marks = kind_of(name).marks()
    pieces = [*marks * 3, *(mark[: len(mark) // 2] for mark in marks), *OWN.get(name, []) * 3, *JSON, *COMMON]
    for output, chance in outputs_of(name, pieces, num):
        reason = chance.choice([STOP, LENGTH])
        of = context(chance.choice([TOOLS, TOOLS, []]), chance.choice(["", "<think>\n", *marks]))
        parts = parsed(name, [output], reason, of)
        assert parsed(name, cut(output, chance), reason, of) == parts, output
        assert parsed(name, output, reason, of) == parts, output
        check_arguments(parts)


def check_arguments(parts: Sequence[AnswerPart]) -> None:
    """The arguments of a call that has its end are a JSON object; those of another one, the beginning of one."""
    arguments = ""
    for part in parts:
        match part.WhichOneof("part"):
            case "tool_call":
                arguments = ""
            case "arguments":
                arguments += part.arguments
                assert isinstance(from_json(arguments, allow_partial=True), dict), parts
            case "tool_call_end":
                value = json.loads(arguments)
                assert isinstance(value, dict), parts
                json.dumps(value, ensure_ascii=False).encode()  # without halves of surrogate pairs


def check_text(name: str, num: int) -> None:
    """Nothing is lost if no call was taken, but white space beside marks where that is left out. The outputs have no
    marks that are left out themselves: those of reasoning and of empty sections, and all of
    Harmony's."""
    kind = kind_of(name)
    is_section = issubclass(kind, SectionParser | AttributesParser)
    sections = set(kind.calls) - {getattr(kind, "call_begin", "")} if is_section else set()
    left_out = {*sum(kind.thinks, ()), *kind.frames, *(OWN[name] if kind is Harmony else ())}
    pieces = [
        f"{piece}x" if piece in sections else piece
        for piece in [*kind.marks() * 3, *OWN.get(name, []) * 3, *JSON, *COMMON]
        if piece not in left_out
    ]
    for output, _ in outputs_of(name, pieces, num):
        parts = parsed(name, [output], STOP, context())
        if any(part.WhichOneof("part") != "text" for part in parts):
            continue
        text = "".join(part.text for part in parts)
        if kind.strips[0]:
            text, output = re.sub(r"\s", "", text), re.sub(r"\s", "", output)
        assert text == output


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_fixtures_are_parsed_as_they_should_be_however_they_are_cut(family: str) -> None:
    for fixture in load_fixtures(families=[family]):
        rows = judged(fixture, FAMILIES[family])
        status = Status.SOFT_PASS if fixture.id in CONTRADICTED else Status.PASS
        assert case_status(rows) is status, [row for row in rows if row.status is not Status.PASS]


@pytest.mark.parametrize("name", PARSERS)
def test_parts_of_random_outputs_do_not_depend_on_cuts_and_complete_calls_have_arguments(name: str) -> None:
    check_cuts(name, 400)


@pytest.mark.slow
@pytest.mark.parametrize("name", PARSERS)
def test_parts_of_many_random_outputs_do_not_depend_on_cuts(name: str) -> None:
    check_cuts(name, MANY)


@pytest.mark.parametrize("name", PARSERS)
def test_what_is_too_long_or_was_read_too_often_does_not_depend_on_cuts_either(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_reader, "MAX_HEAD", 30)
    monkeypatch.setattr(output_reader, "MAX_READ_AGAIN", 60)
    check_cuts(name, 400)
    check_text(name, 400)


@pytest.mark.parametrize("name", PARSERS)
def test_no_character_is_lost_where_no_call_was_taken(name: str) -> None:
    check_text(name, 1000)


@pytest.mark.slow
@pytest.mark.parametrize("name", PARSERS)
def test_no_character_of_many_random_outputs_is_lost_where_no_call_was_taken(name: str) -> None:
    check_text(name, MANY)


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "%s"}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"a": "%s"}, "name": "f"}</tool_call>'),
        ("glm", '<tool_call>g<arg_key>a</arg_key><arg_value>{"b": "%s"}</arg_value></tool_call>'),
    ],
)
def test_half_a_surrogate_pair_becomes_the_replacement_character(name: str, output: str) -> None:
    parts = parsed(name, output % r"\ud83d\ude00, \ud83d \ude00\ud83d\\ud83d", STOP, context())
    assert r'"\ud83d\ude00, \ufffd \ufffd\ufffd\\ud83d"' in "".join(part.arguments for part in parts)


@pytest.mark.parametrize(
    "output",
    [
        '<tool_call>{"name": "f", "arguments": {"a": "1", "c": {"d": [1, 2, ] ,\n}, }}</tool_call>',
        '<tool_call>[{"arguments": {"a": "1", "c": {"d": [1, 2,]}}, "name": "f" , }, ]</tool_call>',
    ],
)
def test_a_comma_after_the_last_value_is_left_out(output: str) -> None:
    parts = parsed("hermes", output, STOP, context())
    assert json.loads("".join(part.arguments for part in parts)) == {"a": "1", "c": {"d": [1, 2]}}
    assert [part.WhichOneof("part") for part in parts] == ["tool_call", "arguments", "tool_call_end"]


def test_a_malformed_call_has_the_arguments_before_its_fault() -> None:
    output = '<tool_call>{"name": "f", "arguments": {"a": "a "b" c"}}\n</tool_call>Then.'
    assert parsed("hermes", output, STOP, context()) == [
        AnswerPart(tool_call=ToolCall(id="call", name="f")),
        AnswerPart(arguments='{"a": "a "'),
        AnswerPart(text="Then."),
    ]


@pytest.mark.parametrize(
    ("name", "section"),
    [
        (
            "deepseek_v3",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>\n```json\n{}\n```<｜tool▁calls▁end｜>",
        ),
        ("deepseek_dsml", "<｜DSML｜tool_calls><｜DSML｜invoke></｜DSML｜invoke></｜DSML｜tool_calls>"),
        ("kimi_k2", "<|tool_calls_section_begin|>I call none.<|tool_calls_section_end|>"),
    ],
)
def test_a_section_without_a_call_is_text(name: str, section: str) -> None:
    output = f"a {section} b"
    assert parsed(name, output, STOP, context()) == [AnswerPart(text=output)]


@pytest.mark.parametrize("name", PARSERS)
def test_without_tools_calls_are_text(name: str) -> None:
    for mark in kind_of(name).calls:
        output = f'a {mark}{{"name": "f", "arguments": {{}}}}'
        assert parsed(name, [output], STOP, context([])) == [AnswerPart(text=output)]


@pytest.mark.parametrize(
    "output",
    [
        '{"name": "f", "parameters": {"a": "1"}}{"name": "g", "parameters": {}}',
        '<|python_start|>{"name": "f", "parameters": {"a": "1"}}; {"name": "g", "parameters": {}}<|python_end|>',
        '<|python_start|><|python_end|>{"name": "f", "parameters": {"a": "1"}}\n{"name": "g", "parameters": {}}',
    ],
)
def test_llama_4_calls_tools_in_json_where_its_template_asks_for_it(output: str) -> None:
    parts = parsed("pythonic", [output], STOP, context())
    assert [part.tool_call.name for part in parts if part.HasField("tool_call")] == ["f", "g"]
    assert [part.arguments for part in parts if part.arguments] == ['{"a": "1"}', "{}"]
    assert not any(part.text for part in parts)


@pytest.mark.parametrize(
    "output",
    [
        "<think>Hm.</think><response>Yes.</response>",
        "Here is my thought process:\n\nHm.\n\nHere is my response:\n\nYes.",
        "Here's my thought process: Hm. Here's my response: Yes.",
    ],
)
def test_granite_reasons_under_headings_too(output: str) -> None:
    assert parsed("granite", output, STOP, context()) == [AnswerPart(reasoning="Hm."), AnswerPart(text="Yes.")]


@pytest.mark.parametrize("name", PARSERS)
def test_a_megabyte_of_beginnings_takes_less_than_a_second(name: str) -> None:
    mark = [*kind_of(name).calls, "<|channel|>"][0]
    for beginning in (mark[:-1], f"{mark}[\\'"):  # each of the latter may begin a list of calls, which none ends
        assert any(sum(seconds_of_halves(name, beginning, MEGABYTE)) < 1 for _ in range(TRIES))


@pytest.mark.slow
@pytest.mark.parametrize("name", PARSERS)
def test_a_megabyte_of_any_mark_or_its_half_takes_seconds_at_most(name: str) -> None:
    for mark in PARSERS[name].marks():
        for beginning in {mark, mark[:-1], mark[: len(mark) // 2]} - {""}:
            assert sum(seconds_of_halves(name, beginning, MEGABYTE)) < LONGEST_S, beginning


@pytest.mark.slow
@pytest.mark.parametrize("name", PARSERS)
def test_time_is_linear_in_the_output(name: str) -> None:
    calls = kind_of(name).calls
    for begin in [*calls, *OWN.get(name, []), *JSON, *COMMON]:
        for beginning in {begin, begin[:-1] or begin, *(call + begin for call in calls)}:
            assert any(is_linear(name, beginning) for _ in range(TRIES)), beginning


def is_linear(name: str, beginning: str) -> bool:
    """The second half of an output takes as long as the first one. Of quadratic time it would take three quarters."""
    first_s, second_s = seconds_of_halves(name, beginning, QUARTER)
    return second_s < 1.5 * first_s + 0.05


def seconds_of_halves(name: str, beginning: str, length: int) -> tuple[float, float]:
    output, parser = beginning * (length // len(beginning)), PARSERS[name](context())
    start_s = half_s = time.process_time()
    for at in range(0, len(output), 1000):
        parser.feed(output[at : at + 1000])
        if at < length // 2:
            half_s = time.process_time()
    parser.finish(STOP)
    return half_s - start_s, time.process_time() - half_s


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("llama3_json", '{"name": "f", "parameters": {}}'),
        ("pythonic", '{"name": "f", "parameters": {}}'),
        ("qwen_xml", "<function=f></function>"),
    ],
)
def test_the_time_of_a_call_does_not_grow_with_the_tools(name: str, call: str) -> None:
    seconds = []
    for others in (1, MAX_TOOLS - 1):
        tools = ChatMessages(tools=[*(Tool(name=f"f{number}") for number in range(others)), Tool(name="f")]).tools
        start_s = time.process_time()
        parts = parsed(name, [call * 2000], STOP, context(tools))
        seconds.append(time.process_time() - start_s)
        assert sum(part.HasField("tool_call_end") for part in parts) == 2000
    assert seconds[1] < 3 * seconds[0] + 0.2


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("qwen_xml", "<function=f><parameter=a>1</parameter><parameter=x>1</parameter></function>"),
        ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"),
    ],
)
def test_the_schema_of_a_tool_is_read_once(name: str, call: str) -> None:
    schema = json.dumps({"properties": {"a": {"enum": ["1"] * 100_000}, "b": [{}] * 100_000}})
    start_s = time.process_time()
    parts = parsed(name, [call * 500], STOP, context([Tool(name="f", parameters=schema)]))
    assert time.process_time() - start_s < LONGEST_S
    arguments = [part.arguments for part in parts if part.arguments]
    assert len(arguments) == 500
    assert {json.loads(text)["a"] for text in arguments} == {"1"}


@pytest.mark.parametrize("depth", [200, 490, 100_000])
def test_no_schema_is_too_deep(depth: int) -> None:
    schema = '{"properties": {"b": ' + '{"anyOf": [' * depth + "{}" + "]}" * depth + "}}"
    parts = parsed("qwen_xml", [B_IS.format("1")], STOP, context([Tool(name="f", parameters=schema)]))
    assert parts[1:] == [AnswerPart(arguments='{"b": 1}'), AnswerPart(tool_call_end=ToolCallEnd())]


@pytest.mark.parametrize(("depth", "is_array"), [(MAX_DEPTH, True), (MAX_DEPTH + 1, False)])
def test_a_raw_value_that_is_too_deep_for_clients_is_a_string(depth: int, is_array: bool) -> None:
    value = "[" * depth + "]" * depth
    (arguments,) = (
        part.arguments
        for part in parsed("qwen_xml", [B_IS.format(value)], STOP, context([Tool(name="f")]))
        if part.arguments
    )
    assert isinstance(json.loads(arguments)["b"], list) is is_array


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("hermes", '<tool_call>{"id": "own", "name": "f", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "id" :\n"own", "arguments": {}}</tool_call>'),
        ("mistral", '[TOOL_CALLS][{"id": "own", "name": "f", "arguments": {}}]'),
        ("mistral", '[TOOL_CALLS][{"arguments": {}, "name": "f", "id": "own"}]'),
    ],
)
def test_a_call_keeps_the_id_that_the_model_gave_it(name: str, output: str) -> None:
    assert parsed(name, [output], STOP, context())[0].tool_call.id == "own"


def test_a_line_break_stands_between_messages_of_text() -> None:
    def output_of(*messages: str) -> str:
        return "<|end|><|start|>assistant".join(messages)

    said, final = "<|channel|>commentary<|message|>I look.", "<|channel|>final<|message|>It rains."
    left_out = "<|channel|>analysis to=python<|message|>look()"
    for output in (output_of(said, final), output_of("I look.", final), output_of(said, left_out, final)):
        for pieces in ([output], list(output)):
            assert parsed("harmony", pieces, STOP, context()) == [AnswerPart(text="I look.\nIt rains.")]
    output = output_of("<|channel|>final<|message|>", said, "<|channel|>analysis<|message|>Hm.", final)
    parts = [AnswerPart(text="I look."), AnswerPart(reasoning="Hm."), AnswerPart(text="It rains.")]
    assert parsed("harmony", [output], STOP, context()) == parts


@pytest.mark.parametrize("name", PARSERS)
def test_what_is_held_back_has_a_limit(name: str) -> None:
    for mark in [*kind_of(name).calls, ""]:
        parser = PARSERS[name](context())
        assert isinstance(parser, OutputReader)
        for _ in range(1000):
            parser.feed(f"{mark}{'x ' * 100}")
            assert parser.num_held <= MAX_HEAD + 1000
