"""The bodies of POST /v1/messages and /v1/messages/count_tokens."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from trunkline.status import invalid
from trunkline.v1.inference_pb2 import ChatMessages, GenerateRequest, TokenizeRequest, Tool
from trunkline_router.edge.anthropic.input_blocks import SERVER_TOOLS, Blocks, Texts, pieces_of
from trunkline_router.edge.chat_messages import Turn, merged
from trunkline_router.edge.request_fields import (
    NOT_YET,
    Count,
    Fields,
    MaxTokens,
    SamplingFields,
    Strings,
    prompt_named,
    template_variables,
)
from trunkline_router.edge.tool_fields import ToolName, may_call, tool_of
from trunkline_router.prompts.conversation import ASSISTANT, MAX_MESSAGES, MAX_TOOLS, THINKING
from trunkline_router.record.error_statuses import THREAD

FIELD_NAMES = prompt_named("messages", stop="stop_sequences")  # what refusals name


class ToolDefinition(Fields):
    """A tool that the model may call. That its calls conform to the schema (`strict`) is not enforced yet."""

    type: str | None = None
    name: ToolName | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None

    # Marks for Anthropic's cache, and whether arguments are streamed, which they are.
    ignored: ClassVar[frozenset[str]] = frozenset({"cache_control", "eager_input_streaming"})
    unserved: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("allowed_callers", "defer_loading", "input_examples"), NOT_YET
    )
    defaults: ClassVar[Mapping[str, Any]] = {"allowed_callers": ["direct"]}

    def unknown(self, prefix: str = "") -> list[str]:
        if self.type not in (None, "custom"):  # other kinds have other fields: the kind is what is not served
            raise invalid(f"{prefix}type", f"{self.type[:32]!r} {SERVER_TOOLS}")
        for name in ("name", "input_schema"):
            if getattr(self, name) is None:
                raise invalid(prefix + name, "field required")
        return super().unknown(prefix)

    def proto(self, where: str) -> Tool:
        """Returns the tool. Raises RequestRefused (INVALID_REQUEST)."""
        return tool_of(self.name or "", self.description, self.input_schema, f"{where}.input_schema")


class ToolChoice(Fields):
    """Whether the model may call tools, and more than one of them in an answer."""

    type: str
    disable_parallel_tool_use: bool | None = None

    ignored: ClassVar[frozenset[str]] = frozenset({"name"})  # of a type that is refused


class Thinking(Fields):
    """Whether the model thinks before it answers, as a variable of its template. It thinks as long as it wants:
    `budget_tokens` is not enforced."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None  # "summarized" is the whole text


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
    chat_template_kwargs: dict[str, Any] | None = None  # as vLLM names it

    ignored: ClassVar[frozenset[str]] = frozenset({"cache_control"})
    unserved: ClassVar[Mapping[str, str]] = {
        "mcp_servers": SERVER_TOOLS,
        "container": NOT_YET,
        "context_management": NOT_YET,
        "inference_geo": NOT_YET,
        "output_config": NOT_YET,
        "output_format": "is not supported: structured output is not served",
        "speed": NOT_YET,
        THREAD: "is not supported: conversations are not stored, so each request has all of its messages",
    }

    def chat(self) -> ChatMessages:
        """Returns the conversation for the chat template: the system prompt first, messages of one role in a row as
        one. A final message of the assistant is continued. Raises RequestRefused (INVALID_REQUEST)."""
        system = pieces_of(self.system, "system", "system")
        turns: list[Turn] = [("system", system)] if system else []
        turns += [
            (message.role, pieces_of(message.content, message.role, f"messages[{index}].content"))
            for index, message in enumerate(self.messages)
        ]
        choice = self.tool_choice
        tools = (self.tools or ()) if may_call(choice.type if choice else None) else ()
        return ChatMessages(
            messages=merged(turns),
            continue_final_message=self.messages[-1].role == ASSISTANT,
            template_variables=template_variables(self._variables()),
            tools=[tool.proto(f"tools[{index}]") for index, tool in enumerate(tools)],
            single_tool_call=choice is not None and bool(choice.disable_parallel_tool_use),
        )

    def _variables(self) -> dict[str, Any] | None:
        if self.thinking is None:
            return self.chat_template_kwargs
        thinks = dict.fromkeys(THINKING, self.thinking.type != "disabled")
        return thinks | (self.chat_template_kwargs or {})


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

    def generate_request(self, request_id: str) -> GenerateRequest:
        """Returns the request. An answer may be as long as the context allows, whatever max_tokens says: clients ask
        for more than small models have. Raises RequestRefused (INVALID_REQUEST)."""
        sampling = self.sampling(stop=self.stop_sequences)
        return self.generate(request_id, sampling, chat=self.chat(), fit_max_tokens=True)


class CountRequest(ConversationFields):
    """A conversation whose tokens are counted."""

    def tokenize_request(self) -> TokenizeRequest:
        """Returns the request. Raises RequestRefused (INVALID_REQUEST)."""
        return TokenizeRequest(model=self.model or "", chat=self.chat())
