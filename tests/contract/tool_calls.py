"""Counts the fixtures of canitoolcall that the parsers of answers read as they should: make tool-calls.

A fixture is parsed as a whole, by characters, at its marks, and in random pieces. Its tokenizer is not needed, because
cuts between any two characters include those between tokens.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from canitoolcall.checks import case_status, run_checks
from canitoolcall.chunking import ChunkStrategy, split
from canitoolcall.fixtures import Family, Fixture, load_families, load_fixtures
from canitoolcall.results import CheckResult, Observation, ParseResult, Status, StreamAccumulator

from tests.tagged_answers import answer_parts
from trunkline.answer.answer_parser import PARSERS
from trunkline.answer.output_reader import AnswerContext
from trunkline.v1.generation_pb2 import FinishReason
from trunkline.v1.inference_pb2 import AnswerPart, Tool

# The answer formats of families, and of variants that differ from their family.
FORMATS = {
    "deepseek": "deepseek_dsml",
    "deepseek-v3": "deepseek_v3",
    "deepseek-v31": "deepseek_v3",
    "gemma4": "gemma4",
    "glm": "glm",
    "gpt-oss": "harmony",
    "kimi": "kimi_k2",
    "kimi-k3-xtml": "kimi_k3",
    "llama": "llama3_json",
    "llama4-pythonic": "pythonic",
    "mistral": "mistral",
    "qwen3-hermes": "hermes",
    "qwen3-xml": "qwen_xml",
}
SHOWN = (Status.PASS, Status.SOFT_PASS, Status.FAIL)
# How an output is cut: at the marks of its family, and into random pieces of so many characters at most.
STRATEGIES = ("special", "rand:1:1", *(f"rand:{seed}:{most}" for most in (8, 40) for seed in (1, 2, 3)))


def judged(fixture: Fixture, family: Family) -> list[CheckResult]:
    """Returns what the checks say of each parse."""
    streams = {name: parsed(fixture, family, pieces) for name, pieces in cuts(fixture, family)}
    whole = parsed(fixture, family, [fixture.raw_output])
    return run_checks(fixture, family, Observation(nonstream=whole, streams=streams))


def format_of(fixture: Fixture, family: Family) -> str:
    model = family.reference_for(fixture.reference_model)
    assert model is not None
    return FORMATS.get(model.variant or "") or FORMATS[fixture.family]


def parsed(fixture: Fixture, family: Family, pieces: Sequence[str]) -> ParseResult:
    """Returns what a reader has of the parts: a call that has no end is none."""
    model = family.reference_for(fixture.reference_model)
    assert model is not None
    prompt_end = fixture.generation_prompt
    context = AnswerContext(
        tools=[_tool(tool) for tool in fixture.tools],
        prompt_end=(model.default_generation_prompt or "") if prompt_end is None else prompt_end,
    )
    parser = PARSERS[format_of(fixture, family)](context)
    length, stop = FinishReason.FINISH_REASON_LENGTH, FinishReason.FINISH_REASON_STOP
    return _result(answer_parts(parser, pieces, length if fixture.truncated else stop))


def cuts(fixture: Fixture, family: Family) -> Iterator[tuple[str, list[str]]]:
    output = fixture.raw_output
    for name in STRATEGIES:
        units = _units(output, family.markers) if name == "special" else list(output)
        strategy = ChunkStrategy.parse(name)
        yield name, ["".join(group) for group in split(units, strategy, special=set(family.markers))]


def _units(output: str, marks: Sequence[str]) -> list[str]:
    return re.findall("|".join([*map(re.escape, marks), "."]), output, re.DOTALL)


def _tool(tool: Mapping[str, Any]) -> Tool:
    function = tool["function"]
    return Tool(name=function["name"], parameters=json.dumps(function.get("parameters", {})))


def _result(parts: Sequence[AnswerPart]) -> ParseResult:
    read, call = StreamAccumulator(), ["", ""]
    for part in parts:
        match part.WhichOneof("part"):
            case "text":
                read.add_content(part.text)
            case "reasoning":
                read.add_reasoning(part.reasoning)
            case "tool_call":
                call = [part.tool_call.name, part.tool_call.arguments]
            case "arguments":
                call[1] += part.arguments
            case "tool_call_end":
                read.append_tool_call(*call)
    return read.result()


def main() -> None:
    families, counts = load_families(), dict[str, Counter[Status]]()
    for fixture in load_fixtures():
        family = families[fixture.family]
        rows = judged(fixture, family)
        status = case_status(rows)
        counts.setdefault(fixture.family, Counter())[status] += 1
        if status is not Status.PASS:
            bad = next(row for row in rows if row.status is status)
            print(f"{fixture.id}: {status.value}, {bad.check} ({bad.strategy}): {bad.detail}", file=sys.stderr)
    total = sum(counts.values(), Counter[Status]())
    print("| Family | Fixtures | Pass | Soft pass | Fail |\n|---|---:|---:|---:|---:|")
    for name, count in [*sorted(counts.items()), ("all", total)]:
        print(f"| {name} | {count.total()} | {' | '.join(str(count[status]) for status in SHOWN)} |")


if __name__ == "__main__":
    main()
