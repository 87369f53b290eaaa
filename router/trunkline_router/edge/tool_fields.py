"""Tools in the requests of all protocols: their definitions, and which of them the model may or must call."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import orjson
from pydantic import Field

from trunkline.status import invalid
from trunkline.v1.inference_pb2 import Tool
from trunkline_router.edge.request_fields import json_text

ToolName = Annotated[str, Field(min_length=1)]
ToolChoice = str | dict[str, Any]  # what to do, or an object with that as its type

CUSTOM, INPUT = "custom", "input"  # a kind of tools that take a text, and the argument that has it

ONLY_FUNCTIONS = "is not supported: tools are functions that the client runs"
# Kinds of tools that OpenAI and Anthropic run on their own servers, without the version at their ends, and the groups
# (`namespace`) that no template can write. The tools that clients send along by default are among them.
_SERVER_TOOL = re.compile(
    r"(web_search|web_search_preview|web_fetch|file_search|code_interpreter|code_execution|image_generation|mcp"
    r"|mcp_toolset|namespace|tool_search|tool_search_tool_regex|tool_search_tool_bm25)(_\d{8}|_\d{4}_\d\d_\d\d)?"
)
CHOICE = "tool_choice"


def tool_of(
    name: str, description: str | None, parameters: Mapping[str, Any] | None, *, strict: bool | None, field: str
) -> Tool:
    """Returns a tool. Raises RequestRefused (INVALID_REQUEST).

    parameters: the JSON schema of the arguments;  field: that has it
    """
    schema = "" if parameters is None else json_text(parameters, field)
    return Tool(name=name, description=description or "", parameters=schema, strict=bool(strict))


def custom_parameters(form: str) -> dict[str, Any]:
    """Returns the JSON schema of a tool that takes a text: templates know tools with arguments alone.

    form: what the text must be like, as the model is told
    """
    properties = {INPUT: {"type": "string", **({"description": form} if form else {})}}
    return {"type": "object", "properties": properties, "required": [INPUT], "additionalProperties": False}


def custom_input(arguments: str) -> str:
    """Returns the text that such a tool is called with: the argument `input`, or all of the JSON if the model has named
    another one. It is empty as long as the JSON is not whole."""
    try:
        given = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return ""
    text = given.get(INPUT) if isinstance(given, dict) else None
    return text if isinstance(text, str) else arguments


def check_kind(kind: str | None, field: str) -> None:
    """Raises RequestRefused (INVALID_REQUEST) for a tool, or a call of a tool, that is no function.  field: its type"""
    if kind not in (None, "function"):
        raise invalid(field, f"{kind[:32]!r} {ONLY_FUNCTIONS}")


def is_server_tool(kind: str | None) -> bool:
    """Whether tools of this kind run at a server of the API's owner. The model is not told of them."""
    return kind is not None and _SERVER_TOOL.fullmatch(kind) is not None


def chosen_tools(choice: ToolChoice | None, tools: Sequence[Tool]) -> dict[str, Any]:
    """Returns the fields of ChatMessages that say which tools the model may or must call. It is told of those alone:
    without any, what looks like a call is text. Raises RequestRefused (INVALID_REQUEST).

    choice: as in chat completions or responses
    """
    named: dict[str, Any] = choice if isinstance(choice, dict) else {"type": "auto" if choice is None else choice}
    kind = named.get("type")
    if kind == "allowed_tools":
        allowed = named.get("allowed_tools", named)
        kind = allowed.get("mode") if isinstance(allowed, dict) else None
        listed = allowed.get("tools") if isinstance(allowed, dict) else None
        names = {_name(one) for one in listed if not _is_left_out(one)} if isinstance(listed, list) else set()
        if not names <= {tool.name for tool in tools}:
            raise invalid(CHOICE, "allows what is none of the tools")
        tools = [tool for tool in tools if tool.name in names]
    match kind:
        case "auto":
            return {"tools": tools}
        case "none":
            return {"forbids_calls": bool(tools)}
        case "required":
            return {"tools": tools, "requires_call": True}
        case "function" | "custom":
            return {"tools": tools, "called_tool": _name(named)}
    raise invalid(CHOICE, "must be 'auto', 'none', 'required', a function or allowed_tools")


def _is_left_out(choice: Any) -> bool:
    return isinstance(choice, dict) and isinstance(kind := choice.get("type"), str) and is_server_tool(kind)


def _name(choice: Any) -> str:
    """The name of a function, in the form of chat completions or of responses."""
    fields = choice.get("function", choice) if isinstance(choice, dict) else None
    name = fields.get("name") if isinstance(fields, dict) else None
    if not isinstance(name, str) or not name:
        raise invalid(CHOICE, "a function has a name")
    return name
