"""A conversation and its tools, as OpenAI's chat completions have them."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from trunkline.status import invalid
from trunkline.v1.inference_pb2 import ChatMessages, Tool
from trunkline_router.edge.chat_messages import (
    MessageFields,
    PartFields,
    Piece,
    TextOrList,
    call_part,
    message_fields,
    pieces,
    reasoning_part,
    result_part,
)
from trunkline_router.edge.request_fields import (
    STEP_ITEMS,
    Count,
    FieldNames,
    Fields,
    Steps,
    json_text,
    prompt_named,
    template_variables,
)
from trunkline_router.edge.tool_fields import ToolChoice, ToolName, check_kind, chosen_tools, tool_of
from trunkline_router.prompts.conversation import ASSISTANT, MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, TEXT_ALONE, TOOL

TEXT_PARTS = ("text", "input_text", "output_text")
NO_AUDIO = "is not supported: audio is not served"
OLD_CALLS = "is not supported: OpenAI has replaced it by tools"


class Part(Fields):
    """A part of a message's content."""

    type: str
    text: str | None = None
    refusal: str | None = None

    unserved: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("image_url", "input_audio", "audio_url", "video_url", "file"), "is not supported: the models read text alone"
    )
    # What clients send along: Anthropic's caching marks, and parts of an earlier answer.
    ignored: ClassVar[frozenset[str]] = frozenset(
        {"cache_control", "annotations", "logprobs", "citations", "prompt_cache_breakpoint"}
    )

    def piece(self, where: str) -> Piece:
        """Returns the part's text. Raises RequestRefused (INVALID_REQUEST) for other kinds of content."""
        if self.type in TEXT_PARTS:
            name, text = "text", self.text
        elif self.type == "refusal":
            name, text = "refusal", self.refusal
        else:
            raise invalid(where, f"content of type {self.type[:32]!r} {TEXT_ALONE}")
        if text is None:
            raise invalid(f"{where}.{name}", "is missing")
        return text


class FunctionCall(Fields):
    """What a call calls."""

    name: ToolName
    arguments: str

    ignored: ClassVar[frozenset[str]] = frozenset({"parsed_arguments"})  # of openai's parse()


class Call(Fields):
    """A call of a tool in an earlier answer."""

    id: str | None = None
    type: str | None = None
    function: FunctionCall | None = None

    ignored: ClassVar[frozenset[str]] = frozenset({"index"})  # of a stream

    def unknown(self, prefix: str = "") -> list[str]:
        check_function(self, prefix)
        return super().unknown(prefix)

    def part(self) -> PartFields:
        assert self.function is not None
        return call_part(self.id, self.function.name, self.function.arguments)


class Function(Fields):
    """A function that the model may call. If it is `strict`, its calls conform to the schema."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Fields):
    """A tool."""

    type: str
    function: Function | None = None

    ignored: ClassVar[frozenset[str]] = frozenset({"cache_control"})

    def unknown(self, prefix: str = "") -> list[str]:
        check_function(self, prefix)
        return super().unknown(prefix)

    def proto(self, where: str) -> Tool:
        """Returns the tool. Raises RequestRefused (INVALID_REQUEST)."""
        assert self.function is not None
        called = self.function
        field = f"{where}.function.parameters"
        return tool_of(called.name, called.description, called.parameters, strict=called.strict, field=field)


def check_function(tool: Call | FunctionTool, prefix: str) -> None:
    """Raises RequestRefused (INVALID_REQUEST) for other tools than functions. They have other fields, so the kind is
    what is not served."""
    check_kind(tool.type, f"{prefix}type")
    if tool.function is None:
        raise invalid(f"{prefix}function", "field required")


class Message(Fields):
    """One message of a conversation."""

    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: TextOrList[Part] | None = None
    name: str | None = None
    tool_calls: Annotated[list[Call], Field(fail_fast=True, max_length=MAX_PARTS)] | None = None
    tool_call_id: str | None = None
    # What the model thought: other servers have the one or the other name.
    reasoning: str | None = None
    reasoning_content: str | None = None

    # An assistant's message comes back as it was sent to the client, or as litellm shows it.
    ignored: ClassVar[frozenset[str]] = frozenset({"refusal", "annotations", "name", "provider_specific_fields"})
    unserved: ClassVar[Mapping[str, str]] = {"function_call": OLD_CALLS, "audio": NO_AUDIO}

    def message(self, where: str) -> MessageFields:
        """Returns the message for the chat template. Raises RequestRefused (INVALID_REQUEST)."""
        if self.role == "function":
            raise invalid(f"{where}.role", f"'function' {OLD_CALLS}")
        content = pieces(self.content, f"{where}.content")
        if self.role == TOOL:
            content = [result_part(self.tool_call_id, content, self.name)]
        elif self.tool_call_id:
            raise invalid(f"{where}.tool_call_id", f"is only allowed in messages of {TOOL!r}")
        thought = self.reasoning or self.reasoning_content
        if not (self.tool_calls or thought):
            return message_fields(self.role, content)
        if self.role != ASSISTANT:
            field = "tool_calls" if self.tool_calls else "reasoning" if self.reasoning else "reasoning_content"
            raise invalid(f"{where}.{field}", f"is only allowed in messages of {ASSISTANT!r}")
        parts = [call.part() for call in self.tool_calls or ()]  # first, so that chat_named() finds them
        if thought:
            parts.append(reasoning_part(thought))
        return message_fields(self.role, [*parts, *([content] if content and isinstance(content, str) else content)])


Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]


class ChatFields(Fields):
    """A conversation, and how the model's template writes it."""

    messages: Messages | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    thinking_token_budget: Count | None = None  # as vLLM names it
    tools: Annotated[list[FunctionTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    stepwise: ClassVar[str] = "messages"

    def chat(self) -> Steps[ChatMessages]:
        """Returns the conversation for the chat template. Raises RequestRefused (INVALID_REQUEST)."""
        adds_prompt = self.add_generation_prompt
        tools = [tool.proto(f"tools[{index}]") for index, tool in enumerate(self.tools or ())]
        chat = ChatMessages(
            add_generation_prompt=False if adds_prompt is None and self.continue_final_message else adds_prompt,
            continue_final_message=bool(self.continue_final_message),
            template_variables=template_variables(self.chat_template_kwargs),
            reasoning_effort=self.reasoning_effort or "",
            **chosen_tools(self.tool_choice, tools),
            single_tool_call=self.parallel_tool_calls is False,
            max_reasoning_tokens=self.thinking_token_budget,
            documents=json_text(self.documents, "documents") if self.documents else "",
        )
        for index, message in enumerate(self.messages or ()):
            chat.messages.add(**message.message(f"messages[{index}]"))
            if index % STEP_ITEMS == STEP_ITEMS - 1:
                yield
        return chat


# A message's calls are its first parts.
_CALL = re.compile(r"(chat\.messages\[\d+\])\.parts\[(\d+)\]\.tool_call\b")


def chat_named(**more: str) -> FieldNames:
    """Returns the names of an endpoint that takes ChatFields."""
    named = prompt_named("messages", **more)
    return lambda field: named(_CALL.sub(r"\1.tool_calls[\2].function", field))


CHAT_NAMES = chat_named()
MAX_COMPLETION_NAMES = chat_named(max_tokens="max_completion_tokens")
