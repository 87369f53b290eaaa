"""Tools, a question that is asked beside them, and a check of the calls."""

import json
from typing import Any

from jsonschema_rs import Draft202012Validator

SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "unit": {"enum": ["celsius", "fahrenheit"]},
            "days": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
CHECKS = {name: Draft202012Validator(schema) for name, schema in SCHEMAS.items()}
FUNCTIONS: list[Any] = [{"name": name, "description": "x", "parameters": schema} for name, schema in SCHEMAS.items()]
TOOLS: list[Any] = [{"type": "function", "function": function} for function in FUNCTIONS]
QUESTION = "How is the weather?"
ASKED: list[Any] = [{"role": "user", "content": QUESTION}]
Calls = list[tuple[str, str]]  # names and arguments


def check(calls: Calls, *, named: bool) -> None:
    assert len(calls) == 1
    for name, arguments in calls:
        assert name in (("weather",) if named else SCHEMAS)
        CHECKS[name].validate(json.loads(arguments))
