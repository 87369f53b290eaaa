"""The calls that answer bfcl-eval's questions, written as the models of each format write them, parse back exactly."""

import json
from collections.abc import Sequence

import pytest

from tests.contract.bfcl import Question, questions
from tests.contract.call_writers import WRITERS, raw
from trunkline.answer.answer_items import AnswerItems
from trunkline.answer.answer_parser import PARSERS
from trunkline.answer.output_reader import AnswerContext
from trunkline.v1.generation_pb2 import FinishReason

UNTYPED = ("glm", "qwen_xml")  # values are written alike whatever their type: the tool's schema says what a string is


def answered() -> list[Question]:
    return [question for question in questions() if question.calls]


def check(name: str, question: Question, pieces: Sequence[str]) -> None:
    parser, items = PARSERS[name](AnswerContext(question.tools)), AnswerItems()
    parts = [part for piece in pieces for part in parser.feed(piece)]
    for part in [*parts, *parser.finish(FinishReason.FINISH_REASON_STOP)]:
        items.take(part)
    read = [(call.name, json.loads(call.text)) for call in items.calls if call.is_complete]
    assert json.dumps(read) == json.dumps(expected(name, question)), pieces  # 1 is not 1.0 or true, and order counts
    assert not items.text.strip()


def expected(name: str, question: Question) -> list[object]:
    if name not in UNTYPED:
        return [*question.calls]
    schemas = {tool.name: json.loads(tool.parameters)["properties"] for tool in question.tools}
    return [
        (tool, {key: raw(value) if _is_text(schemas[tool].get(key, {})) else value for key, value in of.items()})
        for tool, of in question.calls
    ]


def _is_text(schema: dict[str, object]) -> bool:
    return schema.get("type") == "string"


def check_every_split(name: str, every: int) -> None:
    for question in answered()[::every]:
        output = WRITERS[name](question.calls)
        for at in range(1, len(output)):
            check(name, question, [output[:at], output[at:]])


def test_every_format_has_a_writer() -> None:
    assert WRITERS.keys() == PARSERS.keys()
    assert sum(len(question.calls) for question in answered()) == 3302


@pytest.mark.parametrize("name", WRITERS)
def test_a_call_parses_back_as_it_was_written(name: str) -> None:
    for question in answered():
        check(name, question, [WRITERS[name](question.calls)])


@pytest.mark.parametrize("name", WRITERS)
def test_a_call_parses_back_whatever_the_place_where_it_was_cut(name: str) -> None:
    check_every_split(name, 500)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITERS)
def test_calls_parse_back_at_more_cuts_and_by_characters(name: str) -> None:
    check_every_split(name, 100)
    for question in answered()[::3]:
        check(name, question, [*WRITERS[name](question.calls)])
