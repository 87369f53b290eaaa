"""The bodies of POST /v1/messages and /v1/messages/count_tokens."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from trunkline.status import invalid
from trunkline.v1.inference_pb2 import ChatMessages, GenerateRequest, TokenizeRequest
from trunkline_router.edge.chat_messages import Piece, Turn, merged, pieces
from trunkline_router.edge.request_fields import (
    NOT_YET,
    TOOLS,
    Fields,
    MaxTokens,
    SamplingFields,
    Strings,
    prompt_named,
    template_variables,
)
from trunkline_router.prompts.conversation import ASSISTANT, MAX_MESSAGES, TEXT_ALONE

THINKING = "is not supported: thinking is not served"
# Kinds of content beside images, documents and other media, with the reasons.
KINDS = {
    "tool_use": TOOLS,
    "tool_result": TOOLS,
    "server_tool_use": TOOLS,
    "mcp_tool_use": TOOLS,
    "mcp_tool_result": TOOLS,
    "thinking": THINKING,
    "redacted_thinking": THINKING,
}

FIELD_NAMES = prompt_named("messages", stop="stop_sequences")  # what refusals name


class Block(Fields):
    """A part of a content."""

    type: str
    text: str | None = None

    # Marks for Anthropic's cache, and what an earlier answer had. The cache here needs no marks.
    ignored: ClassVar[frozenset[str]] = frozenset({"cache_control", "citations"})

    def unknown(self, prefix: str = "") -> list[str]:
        self.piece(prefix.removesuffix("."))  # other kinds have other fields: the kind is what is not served
        return super().unknown(prefix)

    def piece(self, where: str) -> Piece:
        """Returns the block's text. Raises RequestRefused (INVALID_REQUEST) for other kinds of content."""
        if self.type != "text":
            kind = self.type[:32]
            raise invalid(where, f"content of type {kind!r} {KINDS.get(kind, TEXT_ALONE)}")
        if self.text is None:
            raise invalid(f"{where}.text", "field required")
        return self.text


Blocks = Annotated[list[Block], Field(fail_fast=True, max_length=MAX_MESSAGES)]


class InputMessage(Fields):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Blocks

    ignored: ClassVar[frozenset[str]] = frozenset({"cache_control"})


class ConversationFields(Fields):
    """A conversation to continue. `thinking` may be "adaptive", which lets a model answer without thinking."""

    messages: Annotated[list[InputMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    model: str | None = None
    system: str | Blocks | None = None
    thinking: dict[str, Any] | None = None
    tool_choice: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # as vLLM names it

    ignored: ClassVar[frozenset[str]] = frozenset({"cache_control"})
    unserved: ClassVar[Mapping[str, str]] = {
        "tools": TOOLS,
        "mcp_servers": TOOLS,
        "container": NOT_YET,
        "context_management": NOT_YET,
        "inference_geo": NOT_YET,
        "output_config": NOT_YET,
        "output_format": "is not supported: structured output is not served",
        "speed": NOT_YET,
    }

    def check(self) -> None:
        if self.thinking is not None and self.thinking.get("type") not in ("disabled", "adaptive"):
            raise invalid("thinking", THINKING)
        if self.tool_choice is not None and self.tool_choice.get("type") not in ("auto", "none"):
            raise invalid("tool_choice", TOOLS)

    def chat(self) -> ChatMessages:
        """Returns the conversation for the chat template: the system prompt first, messages of one role in a row as
        one. A final message of the assistant is continued. Raises RequestRefused (INVALID_REQUEST)."""
        system = pieces(self.system, "system")
        turns: list[Turn] = [("system", system)] if system else []
        turns += [
            (message.role, pieces(message.content, f"messages[{index}].content"))
            for index, message in enumerate(self.messages)
        ]
        return ChatMessages(
            messages=merged(turns),
            continue_final_message=self.messages[-1].role == ASSISTANT,
            template_variables=template_variables(self.chat_template_kwargs),
        )


class MessageRequest(ConversationFields, SamplingFields):
    """A conversation, and how to continue it."""

    max_tokens: MaxTokens
    stream: bool | None = None
    stop_sequences: Strings | None = None

    ignored: ClassVar[frozenset[str]] = ConversationFields.ignored | {"metadata", "service_tier"}

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
