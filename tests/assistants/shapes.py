"""Requests of assistants without their contents: texts, ids and values become "…", and all names and types stay."""

import json
import re
from collections.abc import Mapping
from itertools import count
from typing import Any

from tests.assistants.recorder import Exchange

KEPT_HEADERS = ("accept", "anthropic-beta", "anthropic-version", "content-type")
# Values that say how a request is to be read.
KEPT = {
    *("type", "role", "name", "model", "effort", "summary", "display", "verbosity", "keep", "status", "phase"),
    *("syntax", "tool_choice", "include", "format", "required", "enum", "const", "pattern", "$schema", "tool_name"),
}
IDS = {"id", "call_id", "tool_call_id", "tool_use_id"}
# What of a text decides how it is read.
HEAD = re.compile(r"x-anthropic-billing-header: ?|")


def shape(exchange: Exchange) -> dict[str, Any]:
    """Returns an exchange's request as JSON."""
    headers = {
        name: value if name.lower() in KEPT_HEADERS else "Bearer any" if value.startswith("Bearer ") else "any"
        for name, value in exchange.headers.items()
        if name.lower() not in ("host", "connection", "content-length", "accept-encoding")
    }
    numbers = count(1)
    ids: dict[str, str] = {}

    def without_contents(value: Any, name: str) -> Any:
        if isinstance(value, Mapping):
            return {key: without_contents(each, key) for key, each in value.items()}
        if isinstance(value, list):
            return [without_contents(each, name) for each in value]
        if not value or not isinstance(value, str) or name in KEPT:
            return value
        if name in IDS:
            return ids.setdefault(value, f"id_{next(numbers)}")
        if name == "arguments":
            return json.dumps(without_contents(json.loads(value), ""))
        return f"{HEAD.match(value)[0]}…"  # type: ignore[index]  # it may match nothing, and always does

    return {"path": exchange.path, "headers": headers, "body": without_contents(exchange.body, "")}
