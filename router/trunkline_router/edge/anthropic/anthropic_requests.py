"""The bodies of POST /v1/messages and /v1/messages/count_tokens."""

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from trunkline.status import invalid
from trunkline.v1.inference_pb2 import ChatMessages, GenerateRequest, TokenizeRequest, Tool
from trunkline_router.edge.anthropic.input_blocks import SERVER_TOOLS, Blocks, Texts, pieces_of, references
from trunkline_router.edge.chat_messages import Turn, merged
from trunkline_router.edge.output_format import schema_constraint
from trunkline_router.edge.request_fields import (
    NOT_YET,
    STEP_ITEMS,
    Constraint,
    Count,
    FieldNames,
    Fields,
    MaxTokens,
    SamplingFields,
    Steps,
    Strings,
    prompt_named,
    template_variables,
)
from trunkline_router.edge.tool_fields import ToolName, chosen_tools, is_server_tool, tool_of
from trunkline_router.prompts.conversation import ASSISTANT, MAX_MESSAGES, MAX_TOOLS
from trunkline_router.prompts.reasoning_effort import NO_EFFORT, THINKING
from trunkline_router.record.error_statuses import THREAD

# Claude Code puts a line for Anthropic's accounts before the system prompt. It may change from turn to turn, and in a
# prompt it would keep all that follows out of the prefix cache.
BILLING = "x-anthropic-billing-header:"

FIELD_NAMES = prompt_named(  # what refusals name
    "messages",
    stop="stop_sequences",
    **{"chat.max_reasoning_tokens": "thinking.budget_tokens", "chat.reasoning_effort": "output_config.effort"},
)


class ToolDefinition(Fields):
    """A tool that the model may call. If it is `strict`, its calls conform to the schema.

    defer_loading: the model is not told of the tool before a result refers to it
    """

    type: str | None = None
    name: ToolName | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None

    # Marks for Anthropic's cache, and whether arguments are streamed, which they are.
    ignored: ClassVar[frozenset[str]] = frozenset({"cache_control", "eager_input_streaming"})
    unserved: ClassVar[Mapping[str, str]] = dict.fromkeys(("allowed_callers", "input_examples"), NOT_YET)
    defaults: ClassVar[Mapping[str, Any]] = {"allowed_callers": ["direct"]}

    def unknown(self, prefix: str = "") -> list[str]:
        if is_server_tool(self.type):
            return []
        if self.type not in (None, "custom"):  # other kinds have other fields: the kind is what is not served
            raise invalid(f"{prefix}type", f"{self.type[:32]!r} {SERVER_TOOLS}")
        for name in ("name", "input_schema"):
            if getattr(self, name) is None:
                raise invalid(prefix + name, "field required")
        return super().unknown(prefix)

    def proto(self, where: str) -> Tool:
        """Returns the tool. Raises RequestRefused (INVALID_REQUEST)."""
        field = f"{where}.input_schema"
        return tool_of(self.name or "", self.description, self.input_schema, strict=self.strict, field=field)


class ToolChoice(Fields):
    """Whether the model may or must call tools, and more than one of them in an answer.  name: with the type `tool`"""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None

    @property
    def openai(self) -> dict[str, Any]:
        """As OpenAI's protocols have it."""
        kind = {"any": "required", "tool": "function"}.get(self.type, self.type)
        return {"type": kind, "name": self.name}


class Thinking(Fields):
    """Whether the model thinks before it answers, as a variable of its template, and for how long."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None  # "summarized" is the whole text


class OutputFormat(Fields):
    """The form of the answer's text."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Fields):
    """What the answer is like, and how much the model thinks."""

    format: OutputFormat | None = None
    effort: str | None = None

    unserved: ClassVar[Mapping[str, str]] = {"task_budget": NOT_YET}


class InputMessage(Fields):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Blocks

    ignored: ClassVar[frozenset[str]] = frozenset({"cache_control"})


class ConversationFields(Fields):
    """A conversation to continue."""

    messages: Annotated[list[InputMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    model: str | None = None
    system: Texts | None = None
    thinking: Thinking | None = None
    tools: Annotated[list[ToolDefinition], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the older name of output_config.format
    chat_template_kwargs: dict[str, Any] | None = None  # as vLLM names it

    stepwise: ClassVar[str] = "messages"
    # Which earlier parts of a long conversation Anthropic would clear: models read all of it here.
    ignored: ClassVar[frozenset[str]] = frozenset({"cache_control", "context_management"})
    unserved: ClassVar[Mapping[str, str]] = {
        "mcp_servers": SERVER_TOOLS,
        "container": NOT_YET,
        "inference_geo": NOT_YET,
        "speed": NOT_YET,
        THREAD: "is not supported: conversations are not stored, so each request has all of its messages",
    }

    def left_out(self) -> list[str]:
        return [f"tools[{index}]" for index, tool in enumerate(self.tools or ()) if is_server_tool(tool.type)]

    def chat(self) -> Steps[ChatMessages]:
        """Returns the conversation for the chat template: the system prompt first, messages of one role in a row as
        one. A final message of the assistant is continued. Raises RequestRefused (INVALID_REQUEST)."""
        system = pieces_of(self.system, "system", "system")
        if system and isinstance(system[0], str) and system[0].startswith(BILLING):
            system = system[1:]
        turns: list[Turn] = [("system", system)] if system else []
        for index, message in enumerate(self.messages):
            turns.append((message.role, pieces_of(message.content, message.role, f"messages[{index}].content")))
            if index % STEP_ITEMS == STEP_ITEMS - 1:
                yield
        choice = self.tool_choice
        tools = [tool.proto(f"tools[{index}]") for index, tool in self._shown_tools()]
        return ChatMessages(
            messages=merged(turns),  # type: ignore[arg-type]  # the stubs leave out that fields do
            continue_final_message=self.messages[-1].role == ASSISTANT,
            template_variables=template_variables(self._variables()),
            **chosen_tools(choice.openai if choice else None, tools),
            single_tool_call=choice is not None and bool(choice.disable_parallel_tool_use),
            max_reasoning_tokens=self.thinking.budget_tokens if self.thinking else None,
            reasoning_effort=self._effort() or "",
        )

    def _shown_tools(self) -> Iterator[tuple[int, ToolDefinition]]:
        """The tools that the model may be told of, with their places."""
        found = {name for message in self.messages for name in references(message.content)}
        for index, tool in enumerate(self.tools or ()):
            if not is_server_tool(tool.type) and (not tool.defer_loading or tool.name in found):
                yield index, tool

    def _variables(self) -> dict[str, Any] | None:
        if self.thinking is None or self.thinking.type == "disabled":
            return self.chat_template_kwargs
        return dict.fromkeys(THINKING, True) | (self.chat_template_kwargs or {})

    def _effort(self) -> str | None:
        if self.thinking is not None and self.thinking.type == "disabled":
            return NO_EFFORT
        return self.output_config.effort if self.output_config else None


class MessageRequest(ConversationFields, SamplingFields):
    """A conversation, and how to continue it."""

    max_tokens: MaxTokens
    stream: bool | None = None
    stop_sequences: Strings | None = None

    ignored: ClassVar[frozenset[str]] = ConversationFields.ignored | {"metadata", "service_tier"}

    @property
    def shows_thinking(self) -> bool:
        """Whether the answer has the text of the model's thinking."""
        return self.thinking is None or self.thinking.display != "omitted"

    @cached_property
    def constraint(self) -> Constraint | None:
        current = None if self.output_config is None else self.output_config.format
        if self.output_format is None:
            return None if current is None else schema_constraint(current.schema_, "output_config.format.schema")
        if current is not None:
            raise invalid("output_format", "contradicts output_config.format")
        return schema_constraint(self.output_format.schema_, "output_format.schema")

    @property
    def field_names(self) -> FieldNames:
        """What refusals name."""
        return self.named(FIELD_NAMES)

    def generate_request(self, request_id: str) -> Steps[GenerateRequest]:
        """Returns the request. An answer may be as long as the context allows, whatever max_tokens says: clients ask
        for more than small models have. Raises RequestRefused (INVALID_REQUEST)."""
        sampling = self.sampling(stop=self.stop_sequences)
        return self.generate(request_id, sampling, chat=(yield from self.chat()), fit_max_tokens=True)


class CountRequest(ConversationFields):
    """A conversation whose tokens are counted."""

    def tokenize_request(self) -> Steps[TokenizeRequest]:
        """Returns the request. Raises RequestRefused (INVALID_REQUEST)."""
        return TokenizeRequest(model=self.model or "", chat=(yield from self.chat()))
