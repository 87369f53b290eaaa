"""Types of arguments, as the schema of a tool says them."""

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any

from trunkline.v1.inference_pb2 import Tool

_TYPE_NAMES = {str: "string", bool: "boolean", type(None): "null", list: "array", dict: "object", int: "integer"}


class ArgumentTypes:
    """The types of a tool's arguments. The schema is read once, and only if it is asked for."""

    def __init__(self, tool: Tool) -> None:
        self._tool = tool
        self._known = dict[str, frozenset[str]]()

    def of(self, key: str) -> frozenset[str]:
        """Returns the types that an argument may have; none: any."""
        if key in self._schemas:
            with suppress(RecursionError):
                self._known[key] = types_in(self._schemas.pop(key))
        return self._known.get(key, frozenset())

    @cached_property
    def _schemas(self) -> dict[str, Any]:
        try:
            schemas = json.loads(self._tool.parameters)["properties"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return {}
        return schemas if isinstance(schemas, dict) else {}


def types_in(schema: Any) -> frozenset[str]:
    """Returns the types that a JSON schema allows, as far as it says so; none: any."""
    if not isinstance(schema, Mapping):
        return frozenset()
    named = schema.get("type", [])
    types = {name for name in ([named] if isinstance(named, str) else _items(named)) if isinstance(name, str)}
    if not types:
        for key in ("anyOf", "oneOf", "allOf"):
            types.update(*map(types_in, _items(schema.get(key))))
        values = [schema["const"]] if "const" in schema else _items(schema.get("enum"))
        types.update(map(type_of, values))
    return frozenset(types)


def type_of(value: Any) -> str:
    return _TYPE_NAMES.get(type(value), "number")


def _items(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list) else ()
