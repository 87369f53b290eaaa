"""The schemas of request bodies, from the models that check them."""

from collections.abc import Iterable
from typing import Any

from pydantic.json_schema import models_json_schema

from trunkline_router.edge.openapi.schema_parts import Schema
from trunkline_router.edge.request_fields import Fields

TEMPLATE = "#/components/schemas/{model}"


def request_schemas(kinds: Iterable[type[Fields]], *, allows_unknown_fields: bool) -> tuple[dict[Any, Schema], Schema]:
    """Returns the schema of each kind of body, and the components to which they refer."""
    kinds = list(kinds)
    by_kind, whole = models_json_schema([(kind, "validation") for kind in kinds], ref_template=TEMPLATE)
    components = {name: _plain(schema, allows_unknown_fields) for name, schema in whole["$defs"].items()}
    return {kind: by_kind[kind, "validation"] for kind in kinds}, components


def _plain(schema: Any, allows_unknown_fields: bool) -> Any:
    """Leaves out what pydantic makes of names and defaults: null is the default of all."""
    if isinstance(schema, list):
        return [_plain(part, allows_unknown_fields) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {}
    for name, part in schema.items():
        if (name == "title" and isinstance(part, str)) or (name == "default" and part is None):
            continue
        if name == "additionalProperties" and part is False and allows_unknown_fields:
            continue
        if name == "properties":
            made[name] = {field: _plain(value, allows_unknown_fields) for field, value in part.items()}
        else:
            made[name] = _plain(part, allows_unknown_fields)
    return made
