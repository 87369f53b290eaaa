"""Tools in the requests of all protocols: their definitions, and whether the model may call them."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from trunkline.status import invalid
from trunkline.v1.inference_pb2 import Tool
from trunkline_router.edge.request_fields import json_text

ToolName = Annotated[str, Field(min_length=1)]
ToolChoice = str | dict[str, Any]  # what to do, or an object with that as its type

ONLY_FUNCTIONS = "is not supported: tools are functions that the client runs"
NOT_ENFORCED = "is not supported: calls cannot be enforced yet"


def tool_of(name: str, description: str | None, parameters: Mapping[str, Any] | None, field: str) -> Tool:
    """Returns a tool. Raises RequestRefused (INVALID_REQUEST).

    parameters: the JSON schema of the arguments;  field: that has it
    """
    schema = "" if parameters is None else json_text(parameters, field)
    return Tool(name=name, description=description or "", parameters=schema)


def check_kind(kind: str | None, field: str) -> None:
    """Raises RequestRefused (INVALID_REQUEST) for a tool, or a call of a tool, that is no function.  field: its type"""
    if kind not in (None, "function"):
        raise invalid(field, f"{kind[:32]!r} {ONLY_FUNCTIONS}")


def may_call(choice: ToolChoice | None) -> bool:
    """Whether a tool_choice lets the model call tools. Raises RequestRefused (INVALID_REQUEST) for one that asks for
    more. A model that may not call tools is not told of them: what looks like a call is text then."""
    kind = choice.get("type", "") if isinstance(choice, dict) else "auto" if choice is None else choice
    if kind == "":
        raise invalid("tool_choice", "says nothing: use 'auto' or 'none'")
    if kind not in ("auto", "none"):
        raise invalid("tool_choice", f"{str(kind)[:32]!r} {NOT_ENFORCED}")
    return kind == "auto"
