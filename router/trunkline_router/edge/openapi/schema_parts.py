"""Parts of JSON schemas (draft 2020-12, which OpenAPI 3.1 uses)."""

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}


def component(name: str) -> Schema:
    """A reference to a schema of the page's components."""
    return {"$ref": f"#/components/schemas/{name}"}


def constant(value: object) -> Schema:
    return {"const": value}


def one_of(*values: str | None) -> Schema:
    """One of these texts, or null."""
    return {"enum": list(values)}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, NULL]}


def array(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def mapping(values: Schema) -> Schema:
    """An object with any names."""
    return {"type": "object", "additionalProperties": values}


def record(properties: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None, **more: Any) -> Schema:
    """An object. It has `properties` in any case. Later versions may add others, so clients must not refuse them."""
    named = {**properties, **(optional or {})}
    return {"type": "object", "properties": named, "required": list(properties), **more}
