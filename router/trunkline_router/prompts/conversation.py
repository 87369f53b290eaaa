"""What a conversation may consist of, and what a chat template gets of it.

Templates get what Hugging Face's apply_chat_template passes on: messages with `content`, `reasoning_content`,
`tool_calls` (the arguments as an object), `tool_call_id` and `name`, and tools as OpenAI's API has them. The comments
of ChatMessages (inference.proto) state the rules; each refusal names the part that breaks one. JSON of clients is
parsed in the process that renders, because it may take long.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, NoReturn

from trunkline.answer.json_reader import without_halves
from trunkline.status import invalid
from trunkline.v1.generation_pb2 import ToolCall
from trunkline.v1.inference_pb2 import ChatMessage, ChatMessages, ChatPart, Tool, ToolResult

FIELD = "chat"
ASSISTANT, TOOL = "assistant", "tool"
USUAL_ROLES = ("system", "user", ASSISTANT, TOOL)
# Names of templates.
CONTENT, TOOL_CALLS, TOOLS, DOCUMENTS = "content", "tool_calls", "tools", "documents"
REASONING_NAMES = ("thinking", "reasoning_content")  # templates know one or the other
MAX_MESSAGES = 4096
MAX_PARTS = 8192  # of all messages and results: two for each message
MAX_TOOLS = 1024
MAX_SCHEMA = 262_144  # characters of the parameters of a tool: the event loop may read them
JOINT = "\n"  # between texts that become one, as in vLLM
TEXT_ALONE = "is not supported: the models that are served read text alone"

Values = dict[str, Any]  # a message or a tool as a template gets it
_SHORT_ID = re.compile("[A-Za-z0-9]{9}")


@dataclass(frozen=True, slots=True)
class ToolStyle:
    """How a template gets tools and their calls (tool_trial.py). By default as transformers has them.

    short_ids: ids of calls have nine letters and digits; others are replaced by hashes (Mistral)
    text_arguments: arguments are the text of an object (DeepSeek V3)
    null_content: a message with calls and without text has the content None (DeepSeek R1)
    whole_tools: every tool has a description and parameters (gpt-oss, Hermes 2)
    one_text: the text beside calls is part of the reasoning, if there is any (gpt-oss)
    """

    short_ids: bool = False
    text_arguments: bool = False
    null_content: bool = False
    whole_tools: bool = False
    one_text: bool = False

    def call_id(self, call_id: str) -> str:
        """Equal ids stay equal."""
        if not self.short_ids or not call_id or _SHORT_ID.fullmatch(call_id):
            return call_id
        return sha256(call_id.encode()).hexdigest()[:9]


PLAIN = ToolStyle()


def check_conversation(chat: ChatMessages) -> None:
    """Raises RequestRefused (INVALID_REQUEST) if no template could render the conversation."""
    if chat.continue_final_message and chat.add_generation_prompt:
        raise invalid(FIELD, "add_generation_prompt and continue_final_message exclude each other")
    if not chat.messages:
        raise invalid(FIELD, "the conversation is empty")
    if len(chat.messages) > MAX_MESSAGES:
        raise invalid(FIELD, f"{len(chat.messages)} messages are more than {MAX_MESSAGES}")
    for index, message in enumerate(chat.messages):
        if not message.role:
            raise invalid(f"{FIELD}.messages", f"message {index} has no role")


def template_messages(messages: Iterable[ChatMessage], style: ToolStyle = PLAIN) -> list[Values]:
    """Returns the messages for a template. Raises RequestRefused (INVALID_REQUEST) for a part that is not allowed."""
    made: list[Values] = []
    num_parts = 0
    for index, message in enumerate(messages):
        if not message.parts:  # the usual message
            made.append({"role": message.role, CONTENT: message.content})
            continue
        num_parts += len(message.parts) + sum(
            len(part.tool_result.parts) for part in message.parts if part.HasField("tool_result")
        )
        if num_parts > MAX_PARTS:
            raise invalid(f"{FIELD}.messages", f"the messages have more than {MAX_PARTS} parts")
        made += _messages_of_parts(message, f"{FIELD}.messages[{index}]", style)
    return made


def template_tools(tools: Sequence[Tool], style: ToolStyle = PLAIN) -> list[Values] | None:
    """Returns the tools for a template; None if there are none. Raises RequestRefused (INVALID_REQUEST)."""
    if len(tools) > MAX_TOOLS:
        raise invalid(f"{FIELD}.tools", f"{len(tools)} tools are more than {MAX_TOOLS}")
    return [_tool(tool, f"{FIELD}.tools[{index}]", style) for index, tool in enumerate(tools)] or None


def template_documents(documents: str) -> list[Values] | None:
    """Returns the documents for a template; None if there are none. Raises RequestRefused (INVALID_REQUEST)."""
    value = _loaded(documents or "[]", f"{FIELD}.{DOCUMENTS}")
    if not isinstance(value, list) or not all(isinstance(document, dict) for document in value):
        raise invalid(f"{FIELD}.{DOCUMENTS}", "must be a JSON array of objects")
    return value or None


def json_object(text: str, field: str) -> Values:
    """Returns the object that a client's JSON is; empty without any. Raises RequestRefused (INVALID_REQUEST)."""
    value = _loaded(text or "{}", field)
    if not isinstance(value, dict):
        raise invalid(field, "must be a JSON object")
    return value


def _loaded(text: str, field: str) -> Any:
    """Returns the value of a client's JSON; None if it is no JSON. Raises RequestRefused (INVALID_REQUEST) for what no
    text can have."""
    if without_halves(text) != text:
        raise invalid(field, "has the escape of half a surrogate pair")
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)  # once: to make one takes as long as a call's arguments


def _messages_of_parts(message: ChatMessage, where: str, style: ToolStyle) -> Iterator[Values]:
    """A message for each result of a tool, then one for all other parts."""
    if message.content:
        raise invalid(f"{where}.content", "must be empty beside parts")
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Values] = []
    for field, kind, part in _parts(message.parts, where):
        if (kind == "tool_result") if message.role == ASSISTANT else (kind in ("tool_call", "reasoning")):
            raise invalid(field, f"messages of this role must not have it: only {ASSISTANT!r} calls tools and reasons")
        if kind == "text":
            texts.append(part.text)
        elif kind == "reasoning":
            thoughts.append(part.reasoning)
        elif kind == "tool_call":
            calls.append(_call(part.tool_call, field, style))
        else:
            yield _result(part.tool_result, field, style)
    if style.one_text and thoughts and calls:
        thoughts, texts = [*thoughts, *texts], []
    if texts or thoughts or calls:
        content = None if style.null_content and calls and not texts else JOINT.join(texts)
        made: Values = {"role": message.role, CONTENT: content}
        if thoughts:
            made = dict.fromkeys(REASONING_NAMES, JOINT.join(thoughts)) | made
        if calls:
            made[TOOL_CALLS] = calls
        yield made


def _parts(parts: Iterable[ChatPart], where: str) -> Iterator[tuple[str, str, ChatPart]]:
    """The field, the kind and the part, of each. Raises RequestRefused (INVALID_REQUEST) for one that is not served."""
    for index, part in enumerate(parts):
        kind = part.WhichOneof("part")
        if kind is None:
            raise invalid(f"{where}.parts[{index}]", "has none of the kinds of parts that this router knows")
        field = f"{where}.parts[{index}].{kind}"
        if kind == "image":
            raise invalid(field, TEXT_ALONE)
        yield field, kind, part


def _call(call: ToolCall, field: str, style: ToolStyle) -> Values:
    arguments = json_object(call.arguments, f"{field}.arguments")
    function = {
        "name": _named(call.name, field),
        "arguments": (call.arguments or "{}") if style.text_arguments else arguments,
    }
    return _given(id=style.call_id(call.id)) | {"type": "function", "function": function}


def _result(result: ToolResult, where: str, style: ToolStyle) -> Values:
    texts = [result.content] if result.content or not result.parts else []
    if texts and result.parts:
        raise invalid(f"{where}.content", "must be empty beside parts")
    for field, kind, part in _parts(result.parts, where):
        if kind != "text":
            raise invalid(field, "the result of a tool consists of texts")
        texts.append(part.text)
    call_id = style.call_id(result.call_id)
    return {"role": TOOL, CONTENT: JOINT.join(texts)} | _given(tool_call_id=call_id, name=result.name)


def _tool(tool: Tool, field: str, style: ToolStyle) -> Values:
    function: Values = {"name": _named(tool.name, field)} | _given(description=tool.description)
    if len(tool.parameters) > MAX_SCHEMA:
        raise invalid(f"{field}.parameters", f"has more than {MAX_SCHEMA} characters of JSON")
    if tool.parameters:
        function["parameters"] = json_object(tool.parameters, f"{field}.parameters")
    if style.whole_tools:
        whole: Values = {"name": tool.name, "description": "", "parameters": {"type": "object", "properties": {}}}
        function = whole | function
    return {"type": "function", "function": function}


def _named(name: str, field: str) -> str:
    if not name:
        raise invalid(f"{field}.name", "is missing")
    return name


def _given(**values: str) -> Values:
    return {name: value for name, value in values.items() if value}
