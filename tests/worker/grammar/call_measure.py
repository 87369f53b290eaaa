"""Calls that grammars force, for the tools of bfcl-eval: each list of tools in each style of calls, with random tokens.

python -m tests.worker.grammar.call_measure > bench/results/structured-output/forced-calls-DATE.md
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from random import Random

import jsonschema_rs
import numpy as np
from llguidance import LLMatcher

from tests.contract.bfcl import questions
from tests.contract.call_grammars import STYLES, grammar_of, parsed
from tests.worker.grammar.byte_matcher import END, SCHEMA, TAGS, DoesNotCompile, matcher_of
from trunkline.answer.answer_items import TOOL_CALL
from trunkline.status import RequestRefused
from trunkline.v1.inference_pb2 import Tool

MOST_BYTES = 20_000
# What ends a value, or reasoning: random bytes seldom spell it. Of these the grammar takes what fits.
ENDS = tuple(
    text.encode()
    for text in ('"', "]", "}", "\n</parameter>", "</arg_value>", "</\uff5cDSML\uff5cparameter>", "<|end|>")
)
HEAD = """# Forced calls of bfcl-eval's tools

`python -m tests.worker.grammar.call_measure`. {lists} different lists of tools (bfcl-eval 2026.3.23,
without tools whose schemas nothing satisfies), each once in each style, half of them with a tool that is named. Tokens
are bytes, drawn at random from those that the grammar allows; what ends a value is preferred, so that answers end.
Each answer is read by the parser of its format, and the arguments of its calls are validated by jsonschema-rs against
the schema of the tool as it was sent. A number that no float can hold counts as the largest one.

Lists are strict unless that is refused, mostly for the keyword `optional`. Others are enforced as far as they can be.

| format | lists of strict tools | others | answers | calls | invalid | cut off after {most} bytes |
|---|---:|---:|---:|---:|---:|---:|"""


@cache
def tool_lists() -> list[list[Tool]]:
    """The different lists of tools, without those that nothing can be called with."""
    lists = {b"".join(tool.SerializeToString() for tool in question.tools): question.tools for question in questions()}
    callable_tools = [[tool for tool in tools if _takes_something(tool.parameters)] for tools in lists.values()]
    return [tools for tools in callable_tools if tools]


@cache
def _takes_something(parameters: str) -> bool:
    """Whether any arguments conform to the schema. One asks for an array that is "News"."""
    with suppress(RequestRefused):  # such schemas have keywords that are not enforced
        try:
            matcher_of(SCHEMA, parameters)
        except DoesNotCompile:
            return False
    return True


@cache
def _validator(parameters: str) -> jsonschema_rs.Validator:
    return jsonschema_rs.validator_for(json.loads(parameters))


def _finite(written: str) -> float:
    """A number of JSON. Infinity is none, so the largest float stands for numbers above it."""
    return max(-sys.float_info.max, min(float(written), sys.float_info.max))


def forcing(tools: Sequence[Tool], style: tuple[str, str], *, called: str) -> tuple[LLMatcher, bool]:
    """A matcher of an answer that must call these tools, and whether they are strict."""
    for is_strict in (True, False):
        asked = [Tool(name=tool.name, parameters=tool.parameters, strict=is_strict) for tool in tools]
        try:
            element = grammar_of(*style, tools=asked, requires_call=True, called_tool=called, single_tool_call=True)
            return matcher_of(TAGS, json.dumps({"format": element})), is_strict
        except (RequestRefused, DoesNotCompile):
            if not is_strict:
                raise
    raise AssertionError


def drawn(matcher: LLMatcher, random: Random) -> str | None:
    """A random answer; None if it has not ended after MOST_BYTES."""
    text = bytearray()

    def take(tokens: list[int]) -> None:
        assert matcher.consume_tokens(tokens), "a token that the grammar allows is refused"
        text.extend(tokens)

    while len(text) < MOST_BYTES:
        if forced := matcher.compute_ff_tokens():
            take([token for token in forced if token != END])
        if matcher.is_stopped() or forced[-1:] == [END]:
            return text.decode()
        if random.random() < 0.3:
            end = list(random.choice(ENDS))
            if matcher.validate_tokens(end) == len(end):
                take(end)
                continue
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        if allowed[-1] == END and (len(allowed) == 1 or random.random() < 0.2):
            return text.decode()
        take([int(random.choice(allowed[allowed < END]))])
    return None


def invalid_calls(tools: Sequence[Tool], calls: Sequence[tuple[str, str]], called: str) -> Iterator[str]:
    """What is wrong with calls.  calls: names and arguments;  called: the name that all must have; "": any tool's"""
    schemas = {tool.name: tool.parameters for tool in tools if tool.name == called or not called}
    for name, arguments in calls:
        if name not in schemas:
            yield f"{name} is not to be called"
        elif error := next(_validator(schemas[name]).iter_errors(json.loads(arguments, parse_float=_finite)), None):
            yield f"{name}: {error.message}"


def measured(style: tuple[str, str], lists: Sequence[Sequence[Tool]]) -> tuple[Counter[str], list[str]]:
    """How many lists, answers and calls there are of each kind, and the faults of calls."""
    counts, wrong = Counter[str](), list[str]()
    for index, tools in enumerate(lists):
        random = Random(index)
        called = random.choice(tools).name if index % 2 else ""
        matcher, is_strict = forcing(tools, style, called=called)
        counts["strict" if is_strict else "lenient"] += 1
        if (answer := drawn(matcher, random)) is None:
            counts["cut off"] += 1
            continue
        items = parsed(style[0], answer, tools=tools)
        calls = [(item.name, item.text) for item in items if item.kind == TOOL_CALL and item.is_complete]
        faults = [*invalid_calls(tools, calls, called)] if calls else ["no call"]
        counts["answers"] += 1
        counts["calls"] += len(calls)
        counts["invalid"] += len(faults)
        wrong += [f"{fault}\n{answer}" for fault in faults]
    return counts, wrong


def main() -> None:
    lists = tool_lists()
    print(HEAD.format(lists=len(lists), most=f"{MOST_BYTES:,}"), flush=True)
    for style in STYLES:
        counts, wrong = measured(style, lists)
        cells = [counts[name] for name in ("strict", "lenient", "answers", "calls", "invalid", "cut off")]
        name = " with ".join(f"`{part.strip('`')}`" for part in style if part)
        print(f"| {name} | {' | '.join(f'{cell:,}' for cell in cells)} |", flush=True)
        for one in wrong[:20]:
            print(f"\n```\n{one}\n```\n", flush=True)


if __name__ == "__main__":
    main()
