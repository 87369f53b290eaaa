"""The conversation of a request: what /v1/messages and /v1/messages/count_tokens have in common."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from trunkline.status import invalid
from trunkline.v1.inference_pb2 import ChatMessage, ChatMessages
from trunkline_router.edge.request_fields import Fields, template_variables
from trunkline_router.prompts.chat_template import MAX_MESSAGES

TOOLS = "is not supported: tools are not served"
THINKING = "is not supported: thinking is not served"
NOT_SERVED = "is not supported"
TEXT_ALONE = "is not supported: the models that are served read text alone"
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
# Between parts of a content and between messages that become one, as vLLM joins parts.
JOINT = "\n"

# What refusals name.
FIELD_NAMES = {
    "prompt": "messages",
    "text": "messages",
    "chat": "messages",
    "chat.messages": "messages",
    "template_variables": "chat_template_kwargs",
    "stop": "stop_sequences",
}


class Block(Fields):
    """A part of a content."""

    type: str
    text: str | None = None

    # Marks for Anthropic's cache, and what an earlier answer had. The cache here needs no marks.
    ignored: ClassVar[frozenset[str]] = frozenset({"cache_control", "citations"})

    def plain(self, where: str) -> str:
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
        "container": NOT_SERVED,
        "context_management": NOT_SERVED,
        "inference_geo": NOT_SERVED,
        "output_config": NOT_SERVED,
        "output_format": "is not supported: structured output is not served",
        "speed": NOT_SERVED,
    }

    def check(self) -> None:
        """Raises RequestRefused (INVALID_REQUEST) for what is not served."""
        if self.thinking is not None and self.thinking.get("type") not in ("disabled", "adaptive"):
            raise invalid("thinking", THINKING)
        if self.tool_choice is not None and self.tool_choice.get("type") not in ("auto", "none"):
            raise invalid("tool_choice", TOOLS)

    def chat(self) -> ChatMessages:
        """Returns the conversation for the chat template: the system prompt first, messages of one role in a row as
        one message, because many templates refuse them. A final message of the assistant is continued. Raises
        RequestRefused (INVALID_REQUEST)."""
        turns: list[tuple[str, list[str]]] = []
        if system := _texts(self.system or "", "system"):
            turns.append(("system", system))
        for index, message in enumerate(self.messages):
            texts = _texts(message.content, f"messages[{index}].content")
            if turns and turns[-1][0] == message.role:
                turns[-1][1].extend(texts)
            else:
                turns.append((message.role, texts))
        return ChatMessages(
            messages=[ChatMessage(role=role, content=JOINT.join(texts)) for role, texts in turns],
            continue_final_message=turns[-1][0] == "assistant",
            template_variables=template_variables(self.chat_template_kwargs),
        )


def _texts(content: str | Sequence[Block], where: str) -> list[str]:
    if isinstance(content, str):
        return [content] if content else []
    return [block.plain(f"{where}[{index}]") for index, block in enumerate(content)]
