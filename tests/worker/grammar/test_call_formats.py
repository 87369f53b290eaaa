"""Enforced calls of every format, with the library: random texts of their grammars are calls that the parser reads."""

import json
import re
from random import Random
from typing import Any

import pytest

from tests.contract.call_grammars import PATCH, PATCH_TOOL, STYLES, grammar_of, parsed
from tests.contract.element_writer import Writer
from tests.worker.grammar.byte_matcher import TAGS, accepts, matcher_of, sample
from tests.worker.grammar.call_measure import drawn, measured, tool_lists
from trunkline.answer.answer_items import TOOL_CALL
from trunkline.answer.answer_parser import PARSERS
from trunkline.v1.inference_pb2 import Tool
from trunkline.v1.worker_pb2 import Grammar, GrammarKind

MOST_BYTES = 3_000
SCHEMA = {
    "type": "object",
    "properties": {"place": {"enum": ["Graz", "Linz"]}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["place"],
    "additionalProperties": False,
}
STRICT = [Tool(name=name, parameters=json.dumps(SCHEMA), strict=True) for name in ("weather", "past.weather")]


@pytest.mark.parametrize(("answer_format", "template"), STYLES)
@pytest.mark.parametrize("called", ["", "past.weather"])
def test_random_calls_are_read_and_conform(answer_format: str, template: str, called: str) -> None:
    element = grammar_of(answer_format, template, tools=STRICT, called_tool=called, requires_call=True)
    matcher, found = matcher_of(TAGS, json.dumps({"format": element})), 0
    for seed in range(10):
        text = sample(matcher, Random(seed), MOST_BYTES)
        items = parsed(answer_format, text or "", tools=STRICT)
        for call in (item for item in items if item.kind == TOOL_CALL and text is not None):
            arguments = json.loads(call.text)
            assert call.is_complete
            assert call.name in ((called,) if called else ("weather", "past.weather"))
            assert arguments.pop("place") in ("Graz", "Linz")
            assert arguments.pop("days", 0) in range(10)
            assert not arguments
            found += 1
    assert found >= (1 if answer_format == "harmony" else 5)  # gpt-oss may think at length


@pytest.mark.parametrize(("answer_format", "template"), STYLES)
def test_an_answer_with_strict_tools_may_be_text(answer_format: str, template: str) -> None:
    matcher = matcher_of(TAGS, json.dumps({"format": grammar_of(answer_format, template, tools=STRICT)}))
    begun = "<|channel|>final<|message|>" if answer_format == "harmony" else ""
    assert accepts(matcher, f"{begun}It rains.\n")


@pytest.mark.parametrize(("answer_format", "template"), STYLES)
def test_free_text_has_no_other_mark_that_a_parser_reads_as_a_call(answer_format: str, template: str) -> None:
    matcher = matcher_of(TAGS, json.dumps({"format": grammar_of(answer_format, template, tools=STRICT)}))
    for mark in getattr(PARSERS[answer_format], "calls", ()):
        assert not accepts(matcher, f"So: {mark}"), mark


@pytest.mark.parametrize(("answer_format", "template"), STYLES)
def test_a_text_follows_its_grammar_however_arguments_are_written(answer_format: str, template: str) -> None:
    element = grammar_of(answer_format, template, tools=[PATCH_TOOL], called_tool="apply_patch")
    matcher = matcher_of(TAGS, json.dumps({"format": element}))
    for patch, is_right in ((PATCH, True), (PATCH.strip(), True), (PATCH + "x", False), (PATCH[:-5], False)):
        call = written(element, patch)
        assert accepts(matcher, call) == is_right, call
        if is_right:
            *_, read = parsed(answer_format, call, tools=[PATCH_TOOL])
            assert (read.name, json.loads(read.text), read.is_complete) == ("apply_patch", {"input": patch}, True)


@pytest.mark.parametrize("pattern", ["^a", "z$", "x|y", "^(?:a|[^b]*)$", "a\\\\$", "\\$"])
@pytest.mark.parametrize(("answer_format", "template"), STYLES)
def test_a_pattern_is_searched_for_in_arguments_of_any_style(answer_format: str, template: str, pattern: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}, "required": ["a"]}
    tool = Tool(name="f", parameters=json.dumps({**schema, "additionalProperties": False}), strict=True)
    element = grammar_of(answer_format, template, tools=[tool], called_tool="f")
    matcher = matcher_of(TAGS, json.dumps({"format": element}))
    for text in ("", "a", "za", "az", "yo\nx", "b", "a\\", "$", "(a$)"):
        assert accepts(matcher, written(element, text)) == bool(re.search(pattern, text)), text


def written(element: Any, text: str) -> str:
    """A call whose one argument, which has a pattern, is this text."""
    value = json.dumps({"enum": [text]})
    asked = re.sub(r'\{"type": "string", "pattern": "(?:[^"\\]|\\.)*"\}', lambda _: value, json.dumps(element))
    return Writer(0).of(json.loads(asked))


@pytest.mark.parametrize(("answer_format", "template"), STYLES)
@pytest.mark.parametrize("strict", [True, False])
def test_an_argument_that_no_value_can_be_is_left_out(answer_format: str, template: str, strict: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean", "enum": ["yes"]}, "b": {"type": "integer"}}}
    parameters = json.dumps({**schema, "required": ["b"], "additionalProperties": False})
    tool = Tool(name="f", parameters=parameters, strict=strict)
    matcher = matcher_of(
        TAGS, json.dumps({"format": grammar_of(answer_format, template, tools=[tool], called_tool="f")})
    )
    answer = drawn(matcher, Random(0)) or ""
    *_, call = parsed(answer_format, answer, tools=[tool])
    assert [*json.loads(call.text)] == ["b"]


@pytest.mark.parametrize("style", STYLES)
def test_forced_calls_of_real_tools_are_valid(style: tuple[str, str]) -> None:
    lists = tool_lists()
    counts, wrong = measured(style, lists[:: len(lists) // 20])
    assert not wrong, wrong[0]
    assert counts["calls"] >= 18


def test_as_many_choices_may_follow_reasoning_as_without_it() -> None:
    choices = [*map(str, range(9_999)), '"\\\x7f\n\U0001f600']
    grammar = Grammar(kind=GrammarKind.GRAMMAR_KIND_CHOICE, text=json.dumps(choices, ensure_ascii=False))
    matcher = matcher_of(TAGS, json.dumps({"format": grammar_of("hermes", "", "<think>", grammar, tools=[])}))
    assert accepts(matcher, f"so</think>{choices[-1]}")
    assert not accepts(matcher, f"so</think>{choices[-1]}{choices[-1]}")
