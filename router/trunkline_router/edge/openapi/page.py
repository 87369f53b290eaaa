"""Puts the page together."""

import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from typing import Any

import orjson
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, models_json_schema

from trunkline_router.access.identity.needed_roles import PATHS
from trunkline_router.edge.openapi.answer_schemas import SCHEMAS, Schema, Shape, component, described, schema_of
from trunkline_router.edge.openapi.operations import JSON, OPERATIONS, Operation
from trunkline_router.record.error_statuses import PROTOCOL, TABLE, is_anthropic

EVENTS = "text/event-stream"
TEMPLATE = "#/components/schemas/{model}"
EVENT = described({"data": str, "event?": str}, "one of the server-sent events, with stream: true")
# An API key or a token: OpenAI's clients send it in the first way, Anthropic's in either.
CREDENTIALS = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "an API key or a JWT"},
    "api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
# Statuses of HTTP itself that no operation answers: they are for paths and methods that there are not.
NO_OPERATION = (404, 405)
_SEPARATORS = re.compile(r"[^A-Za-z0-9]+")
_CONVERTER = re.compile(r":path(?=})")


class FieldSchemas(GenerateJsonSchema):
    """Leaves out what pydantic makes of names and defaults: null is the default of all."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def default_schema(self, schema: Any) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def model_schema(self, schema: Any) -> JsonSchemaValue:
        made = super().model_schema(schema)
        made.pop("title", None)
        return made


@cache
def openapi_page(*, allows_unknown_fields: bool = False, has_metrics: bool = True) -> bytes:
    """Returns the page as JSON, with each endpoint of needed_roles.py.

    allows_unknown_fields: the server ignores unknown fields of requests instead of refusing them
    has_metrics: the port has metrics; those of several processes are on ports of their own
    """
    kinds = [operation.request for operation in OPERATIONS.values() if operation.request is not None]
    bodies, defined = models_json_schema(
        [(kind, "validation") for kind in kinds], ref_template=TEMPLATE, schema_generator=FieldSchemas
    )
    requests = defined["$defs"]
    if allows_unknown_fields:
        for schema in requests.values():
            schema.pop("additionalProperties", None)
    paths: dict[str, dict[str, Any]] = {}
    for name, needed in PATHS.items():
        method, path = name.split(" ")
        if path == "/metrics" and not has_metrics:
            continue
        operation = _operation(name, OPERATIONS[name], bodies)
        if not needed.is_open:
            # What may be opened is open to callers without credentials where it is.
            operation["security"] = [{way: []} for way in CREDENTIALS] + ([{}] if needed.open else [])
        paths.setdefault(_CONVERTER.sub("", path), {})[method.lower()] = operation
    page = {
        "openapi": "3.1.0",
        "info": {"title": "Trunkline", "version": version("trunkline")},
        "paths": paths,
        "components": {"securitySchemes": CREDENTIALS, "schemas": {**requests, **SCHEMAS}},
    }
    return orjson.dumps(page)


def _operation(name: str, operation: Operation, bodies: Mapping[Any, Any]) -> dict[str, Any]:
    path = name.split(" ")[1]
    other = Schema(type="object") if operation.media_type == JSON else str
    answer: Shape = component(operation.answer) if operation.answer else other
    if operation.media_type == EVENTS:
        answer = {"event": str, "data": Schema(type="string", contentMediaType=JSON, contentSchema=answer)}
    content = {operation.media_type: {"schema": schema_of(answer)}}
    if operation.streams:
        content[EVENTS] = {"schema": EVENT}
    made: dict[str, Any] = {
        "operationId": _SEPARATORS.sub("_", _CONVERTER.sub("", name)).strip("_").lower(),
        "summary": operation.summary,
        "responses": {"200": {"description": "The answer.", "content": content}, **_refusals(path, operation)},
    }
    if operation.request is not None:
        made["requestBody"] = {
            "required": operation.request.needs_body,
            "content": {JSON: {"schema": bodies[operation.request, "validation"]}},
        }
    if operation.parameters:
        made["parameters"] = [
            {"name": named, "in": place, "required": place == "path", "description": text, "schema": schema_of(shape)}
            for (place, named), (text, shape) in operation.parameters.items()
        ]
    return made


def _refusals(path: str, operation: Operation) -> dict[str, Any]:
    """The responses with errors, by status: those of the endpoint, and those of HTTP itself."""
    codes: dict[int, list[str]] = {}
    rows = [TABLE[reason] for reason in operation.refuses]
    rows += [row for status, row in PROTOCOL.items() if status not in NO_OPERATION]
    for row in rows:
        if row.code not in codes.setdefault(row.status, []):
            codes[row.status].append(row.code)
    error = "MessagesError" if is_anthropic(path) else "Error"
    made: dict[str, Any] = {}
    for status in sorted(codes):
        names = dict.fromkeys(name for name in (operation.others.get(status), error) if name)
        schemas = [component(name) for name in names]
        made[str(status)] = {
            "description": "Refused: " + ", ".join(codes[status]),
            "content": {JSON: {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}},
        }
    return made
