"""The parts of answers, with a parser of a format that models use."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tagged_answers import CALL, END_CALL, MAX_HEAD, TAGGED, THINK, TaggedParser, answer_parts, joined
from trunkline.answer.answer_parser import PARSERS, AnswerParser, AnswerParsers, parsers_of
from trunkline.answer.output_reader import AnswerContext
from trunkline.v1.generation_pb2 import FinishReason, OutputChunk, ToolCall
from trunkline.v1.inference_pb2 import AnswerPart, GenerateResponse, Tool, ToolCallEnd

STOP, LENGTH = FinishReason.FINISH_REASON_STOP, FinishReason.FINISH_REASON_LENGTH
PIECES = [
    *(
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<",
        "<t",
        "</t",
        "ä🦊",
        "\n",
        " ",
        "{",
        "}",
        '"',
        "\\",
        "[",
        "x",
    ),
    '{"name": "f", "arguments": ',
    '{"name": "f", "arguments": {"a": "}<\\"", "b": [1, {}]}}',
    '{"name": "</tool_call>", "arguments": {}}',
    '{"name": "", "arguments": {}}',
    " " * MAX_HEAD,
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
]
CONTEXT = AnswerContext([Tool(name="f"), Tool(name="g")], new_call_id=lambda: "call")
OUTPUTS = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


def text(of: str) -> AnswerPart:
    return AnswerPart(text=of)


def parsed(
    *outputs: str, reason: "FinishReason.ValueType" = STOP, kind: Callable[[AnswerContext], AnswerParser] = TaggedParser
) -> list[AnswerPart]:
    return joined(answer_parts(kind(CONTEXT), outputs, reason))


def cut(output: str, places: Sequence[int]) -> list[str]:
    at = sorted({0, len(output), *(place % (len(output) + 1) for place in places)})
    return [output[start:end] for start, end in pairwise(at)]


def test_text_reasoning_and_calls_become_parts() -> None:
    assert parsed('<think>Hm.</think>Look:<tool_call>{"name": "f", "arguments": {"a": "}"}}</tool_call>!') == [
        AnswerPart(reasoning="Hm."),
        text("Look:"),
        AnswerPart(tool_call=ToolCall(id="call-1", name="f")),
        AnswerPart(arguments='{"a": "}"}'),
        AnswerPart(tool_call_end=ToolCallEnd()),
        text("!"),
    ]


def test_a_call_that_is_cut_off_has_no_end() -> None:
    kinds = [part.WhichOneof("part") for part in parsed('<tool_call>{"name": "f", "arguments": {"a', reason=LENGTH)]
    assert kinds == ["tool_call", "arguments"]


@pytest.mark.parametrize("output", ["<thin", "a < b", "<tool_call>no", '<tool_call>{"name": 1}</tool_call>'])
def test_what_does_not_parse_is_text(output: str) -> None:
    assert parsed(output) == [text(output)]


@pytest.mark.parametrize("kind", [TaggedParser, *PARSERS.values()])
@settings(max_examples=300)
@given(output=OUTPUTS, places=st.lists(st.integers(0, 10_000), max_size=20))
def test_the_parts_do_not_depend_on_where_the_output_was_cut(
    output: str, places: list[int], kind: Callable[[AnswerContext], AnswerParser]
) -> None:
    parts = parsed(output, kind=kind)
    assert parsed(*cut(output, places), kind=kind) == parsed(*output, kind=kind) == parts


@given(OUTPUTS)
def test_what_is_held_back_has_a_limit(output: str) -> None:
    parser = TaggedParser()
    for character in output * 10:
        parser.feed(character)
        assert len(parser.held) <= MAX_HEAD


def parts_of(parsers: AnswerParsers, chunks: list[OutputChunk]) -> list[AnswerPart]:
    response = GenerateResponse(chunks=chunks)
    parsers.parse({chunk.index: chunk for chunk in response.chunks}, response)
    return list(response.parts)


def test_each_choice_has_a_parser_and_its_parts_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PARSERS, TAGGED, TaggedParser)
    parsers = parsers_of(TAGGED, 2)
    assert isinstance(parsers, AnswerParsers)
    assert not parts_of(parsers, [OutputChunk(index=1, text="<th"), OutputChunk(index=0, text="<th")])
    chunks = [OutputChunk(index=1, text="ink>b"), OutputChunk(index=0, text="a", finish_reason=STOP)]
    assert parts_of(parsers, chunks) == [AnswerPart(index=1, reasoning="b"), AnswerPart(index=0, text="<tha")]
    assert parsers_of("", 2) is None
    with pytest.raises(KeyError):
        parsers_of("unknown", 1)


def test_text_that_needs_no_change_can_stay_in_its_chunk() -> None:
    parsers = AnswerParsers("hermes", 2, AnswerContext(text_stays=True))
    seen = list[tuple[str, str]]()
    for output in ("One", " two", " <th", "ree", " four", "\n", "five"):
        response = GenerateResponse(chunks=[OutputChunk(index=1, token_ids=[7], text=output)])
        parsers.parse({chunk.index: chunk for chunk in response.chunks}, response)
        [chunk] = response.chunks
        assert chunk.token_ids == [7]
        assert all(part.index == 1 for part in response.parts)
        seen.append((chunk.text, "".join(part.text for part in response.parts)))
    assert seen == [("", "One"), (" two", ""), ("", ""), ("", " <three"), (" four", ""), ("", ""), ("", "\nfive")]


def test_of_a_single_call_nothing_of_later_calls_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PARSERS, TAGGED, TaggedParser)
    call = CALL + '{"name": "f", "arguments": {"a": 1}}' + END_CALL
    for single, kept in ((True, 1), (False, 2)):
        parsers = AnswerParsers(TAGGED, 2, AnswerContext(single_tool_call=single))
        for index in range(2):  # each choice may have a call
            chunks = [OutputChunk(index=index, text=character) for character in f"a{call}b{call}"]
            chunks.append(OutputChunk(index=index, text="c", finish_reason=STOP))
            parts = [part for chunk in chunks for part in parts_of(parsers, [chunk])]
            assert "".join(part.text for part in parts) == "abc"
            assert sum(part.HasField("tool_call") for part in parts) == kept
            assert sum(part.HasField("tool_call_end") for part in parts) == kept
            assert "".join(part.arguments for part in parts) == '{"a": 1}' * kept


def test_no_other_tag_is_taken_for_one() -> None:
    assert parsed(f"{END_CALL}{THINK[:-1]} {CALL[:-1]}s>") == [text(f"{END_CALL}{THINK[:-1]} {CALL[:-1]}s>")]
