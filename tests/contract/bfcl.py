"""The questions of bfcl-eval: tools, and the calls that answer them.

The Makefile unpacks the package beside the environment's packages, without its dependencies: only its data is read.
"""

import json
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tests.contract.call_writers import Call
from trunkline.v1.inference_pb2 import Tool

DATA = Path(sys.prefix) / "data/bfcl_eval/data"
# JSON schemas' names of the types that the tools have, which come from several languages: as bfcl-eval translates them.
TYPES = {
    "array": ("array", "Array", "ArrayList", "tuple"),
    "boolean": ("boolean", "Boolean"),
    "integer": ("integer", "long"),
    "number": ("float", "double", "number"),
    "object": ("dict", "HashMap", "object"),
    "string": ("string", "String", "char", "any"),
}
NAMED = {name: kind for kind, names in TYPES.items() for name in names}


class Question(NamedTuple):
    """calls: what answers it; none if none is given"""

    tools: list[Tool]
    calls: list[Call]


@cache
def questions() -> list[Question]:
    assert DATA.is_dir(), f"{DATA} is missing: make test unpacks it"
    return [*_questions()]


def _questions() -> Iterator[Question]:
    for path in sorted(DATA.glob("BFCL_v4_*.json")):
        answers = _rows(DATA / "possible_answer" / path.name)
        calls = {row["id"]: row["ground_truth"] for row in answers if isinstance(row["ground_truth"][0], dict)}
        for row in _rows(path):
            if "function" in row:
                tools = [_tool(function) for function in row["function"]]
                yield Question(tools, [_call(answer) for answer in calls.get(row["id"], [])])


def _rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists() or path.stem.endswith("format_sensitivity"):  # that file names rows of others
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def _tool(function: dict[str, Any]) -> Tool:
    parameters = json.dumps(_schema(function["parameters"]), ensure_ascii=False)
    return Tool(name=function["name"], description=function.get("description", ""), parameters=parameters)


def _schema(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_schema(inside) for inside in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _schema(value) for key, value in schema.items()}
    if isinstance(kind := schema.get("type"), str):
        del made["type"]
        made = ({"type": NAMED[kind]} if kind in NAMED else {}) | made
    return made


def _call(answer: dict[str, Any]) -> Call:
    """The first of the calls that are right: each argument has a list of values, in which "" stands for none."""
    [(name, arguments)] = answer.items()
    return name, _first(arguments)


def _first(possible: Any) -> Any:
    if isinstance(possible, dict):
        firsts = {key: value[0] if isinstance(value, list) and value else value for key, value in possible.items()}
        return {key: _first(value) for key, value in firsts.items() if value != ""}
    return [_first(inside) for inside in possible] if isinstance(possible, list) else possible
