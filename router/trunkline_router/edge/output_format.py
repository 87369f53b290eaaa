"""Structured output in the requests of all protocols: what constrains the text of an answer becomes a grammar."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import Field

from trunkline.status import invalid
from trunkline.v1.worker_pb2 import Grammar, GrammarKind
from trunkline_router.edge.request_fields import NOT_YET, Constraint, Fields, Strings, json_text

JSON_OBJECT = {"type": "object"}
GBNF = re.compile(r"^[ \t]*root[ \t]*::=", re.MULTILINE)  # Lark has no "::="


def schema_constraint(schema: Mapping[str, Any], field: str) -> Constraint:
    """Returns the constraint of a JSON schema, with its properties in the client's order. Raises RequestRefused
    (INVALID_REQUEST)."""
    text = json_text(schema, field)
    return Constraint(Grammar(kind=GrammarKind.GRAMMAR_KIND_JSON_SCHEMA, text=text), field)


class NamedSchema(Fields):
    """A JSON schema in OpenAI's APIs. It is enforced whatever `strict` says, and the model is not told of it."""

    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None

    def constraint(self, where: str) -> Constraint | None:
        """Returns what constrains the text; None: nothing. Raises RequestRefused (INVALID_REQUEST).

        where: the field that has this
        """
        if self.schema_ is None:
            raise invalid(f"{where}.schema", "field required")
        return schema_constraint(self.schema_, f"{where}.schema")


class TextFormat(NamedSchema):
    """`text.format` of OpenAI's Responses."""

    type: Literal["text", "json_object", "json_schema"]

    def constraint(self, where: str) -> Constraint | None:
        if self.type == "json_schema":
            return super().constraint(where)
        if self.schema_ is not None:
            raise invalid(f"{where}.schema", "is only allowed with type 'json_schema'")
        return schema_constraint(JSON_OBJECT, where) if self.type == "json_object" else None

    def repeated(self) -> dict[str, Any]:
        """Returns the format as responses repeat it."""
        if self.type != "json_schema":
            return {"type": self.type}
        schema = orjson.Fragment(json_text(self.schema_, "text.format.schema"))
        made = {"type": self.type, "name": self.name or "", "schema": schema, "strict": self.strict}
        return made if self.description is None else {**made, "description": self.description}


class ResponseFormat(Fields):
    """`response_format` of OpenAI, with vLLM's structural tags."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: NamedSchema | None = None
    structures: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    triggers: Strings | None = None
    format: dict[str, Any] | None = None

    def constraint(self, where: str) -> Constraint | None:
        """As NamedSchema.constraint()."""
        kinds = {"json_schema": "json_schema"} | dict.fromkeys(("structures", "triggers", "format"), "structural_tag")
        tag = ("structures", "triggers") if self.format is None else ("format",)
        needed = {"json_schema": ("json_schema",), "structural_tag": tag}.get(self.type, ())
        for name, kind in kinds.items():
            is_given = getattr(self, name) is not None
            if name in needed and not is_given:
                raise invalid(f"{where}.{name}", f"is required with type {kind!r}")
            if is_given and name not in needed:
                rule = "contradicts format" if kind == self.type else f"is only allowed with type {kind!r}"
                raise invalid(f"{where}.{name}", rule)
        if self.json_schema is not None:
            return self.json_schema.constraint(f"{where}.json_schema")
        if self.type == "structural_tag":
            text = json_text({name: getattr(self, name) for name in tag}, where)
            return Constraint(Grammar(kind=GrammarKind.GRAMMAR_KIND_STRUCTURAL_TAG, text=text), where)
        return schema_constraint(JSON_OBJECT, where) if self.type == "json_object" else None


class StructuredOutputs(Fields):
    """`structured_outputs` of vLLM: one constraint. Whitespace within JSON is always the same, whatever
    `disable_any_whitespace` says."""

    json_: Annotated[str | dict[str, Any] | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Strings | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None

    ignored: ClassVar[frozenset[str]] = frozenset({"disable_any_whitespace", "disable_fallback"})
    unserved: ClassVar[Mapping[str, str]] = {
        "whitespace_pattern": f"{NOT_YET}: whitespace within JSON is always the same",
        "disable_additional_properties": f"{NOT_YET}: use additionalProperties in the schema",
    }

    def constraint(self, where: str) -> Constraint:
        """Returns what constrains the text. Raises RequestRefused (INVALID_REQUEST).  where: the field that has this"""
        asked: dict[str, tuple[GrammarKind.ValueType, Any]] = {
            "json": (GrammarKind.GRAMMAR_KIND_JSON_SCHEMA, self.json_),
            "regex": (GrammarKind.GRAMMAR_KIND_REGEX, self.regex),
            "choice": (GrammarKind.GRAMMAR_KIND_CHOICE, self.choice),
            "grammar": (GrammarKind.GRAMMAR_KIND_LARK, self.grammar),
            "json_object": (GrammarKind.GRAMMAR_KIND_JSON_SCHEMA, JSON_OBJECT if self.json_object else None),
            "structural_tag": (GrammarKind.GRAMMAR_KIND_STRUCTURAL_TAG, self.structural_tag),
        }
        given = [name for name, (_, value) in asked.items() if value is not None]
        if len(given) != 1:
            raise invalid(where, f"must have one of {', '.join(asked)}, and only one")
        [name] = given
        kind, value = asked[name]
        if name == "grammar" and GBNF.search(value):
            kind = GrammarKind.GRAMMAR_KIND_EBNF
        field = f"{where}.{name}"
        text = value if isinstance(value, str) else json_text(value, field)
        return Constraint(Grammar(kind=kind, text=text), field)
