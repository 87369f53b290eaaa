"""The body of POST /v1/chat/completions."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from trunkline.status import invalid
from trunkline.v1.inference_pb2 import ChatMessage, ChatMessages, GenerateRequest
from trunkline_router.edge.request_fields import (
    GUIDED,
    NOT_YET,
    Fields,
    GenerationFields,
    Strings,
    template_variables,
)
from trunkline_router.prompts.chat_template import MAX_MESSAGES

MAX_TOP_LOGPROBS = 20
MAX_PARTS = 4096  # of a message
TOOLS = "is not supported: tools are not served"
# Templates know "system", which developers' instructions were called before.
ROLES = {"developer": "system"}
# What refusals name.
FIELD_NAMES = {
    "prompt": "messages",
    "text": "messages",
    "chat": "messages",
    "chat.messages": "messages",
    "template_variables": "chat_template_kwargs",
}
COMPLETION_NAMES = {"max_tokens": "max_completion_tokens"}


class Part(Fields):
    """A part of a message's content."""

    type: str
    text: str | None = None
    refusal: str | None = None

    def plain(self, where: str) -> str:
        """Returns the part's text. Raises RequestRefused (INVALID_REQUEST) for other kinds of content."""
        if self.type in ("text", "input_text", "output_text") and self.text is not None:
            return self.text
        if self.type == "refusal" and self.refusal is not None:
            return self.refusal
        kind = self.type[:32]
        raise invalid(where, f"content of type {kind!r} is not supported: the models that are served read text alone")

    unserved: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("image_url", "input_audio", "audio_url", "video_url", "file"), "is not supported: the models read text alone"
    )
    # What clients send along: Anthropic's caching marks, and parts of an earlier answer.
    ignored: ClassVar[frozenset[str]] = frozenset(
        {"cache_control", "annotations", "logprobs", "citations", "prompt_cache_breakpoint"}
    )


class Message(Fields):
    """One message of a conversation."""

    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[Part], Field(fail_fast=True, max_length=MAX_PARTS)] | None = None
    name: str | None = None

    # An assistant's message comes back as it was sent to the client.
    ignored: ClassVar[frozenset[str]] = frozenset({"refusal", "annotations", "name"})
    unserved: ClassVar[Mapping[str, str]] = {
        "tool_calls": TOOLS,
        "function_call": TOOLS,
        "tool_call_id": TOOLS,
        "audio": "is not supported: audio is not served",
        "reasoning": NOT_YET,
        "reasoning_content": NOT_YET,
    }

    def proto(self, where: str) -> ChatMessage:
        """Returns the message for the chat template. Raises RequestRefused (INVALID_REQUEST)."""
        if self.role in ("tool", "function"):
            raise invalid(f"{where}.role", f"{self.role!r} {TOOLS}")
        return ChatMessage(role=ROLES.get(self.role, self.role), content=plain_text(self.content, f"{where}.content"))


def plain_text(content: str | list[Part] | None, where: str) -> str:
    """Returns the text of a content, parts joined by newlines as in vLLM. Raises RequestRefused (INVALID_REQUEST)."""
    if isinstance(content, str):
        return content
    return "\n".join(part.plain(f"{where}[{index}]") for index, part in enumerate(content or ()))


def conversation(
    messages: list[Message],
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    chat_template_kwargs: dict[str, Any] | None,
) -> ChatMessages:
    """Returns the conversation for the chat template. Raises RequestRefused (INVALID_REQUEST)."""
    chat = ChatMessages(
        messages=[message.proto(f"messages[{index}]") for index, message in enumerate(messages)],
        continue_final_message=bool(continue_final_message),
        template_variables=template_variables(chat_template_kwargs),
    )
    if add_generation_prompt is not None:
        chat.add_generation_prompt = add_generation_prompt
    elif continue_final_message:
        chat.add_generation_prompt = False
    return chat


class ChatRequest(GenerationFields):
    """A conversation to continue."""

    model: Annotated[str, Field(min_length=1)]
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    store: bool | None = None
    response_format: Any = None
    modalities: Strings | None = None
    tool_choice: Any = None

    ignored: ClassVar[frozenset[str]] = GenerationFields.ignored | {"parallel_tool_calls"}
    unserved: ClassVar[Mapping[str, str]] = {
        **GenerationFields.unserved,
        "tools": TOOLS,
        "functions": TOOLS,
        "function_call": TOOLS,
        "audio": "is not supported: audio is not served",
        "prediction": NOT_YET,
        "reasoning_effort": NOT_YET,
        "verbosity": NOT_YET,
        "web_search_options": NOT_YET,
        "documents": NOT_YET,
        "echo": "is not supported for chat completions",
        "chat_template": "is not supported: the model's own template is used",
        "mm_processor_kwargs": "is not supported: the models that are served read text alone",
    }

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "needs logprobs: true")
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise invalid("max_tokens", "contradicts max_completion_tokens")
        if self.response_format not in (None, {"type": "text"}):
            raise invalid("response_format", GUIDED)
        if self.modalities not in (None, ["text"]):
            raise invalid("modalities", "only text is served")
        if self.tool_choice not in (None, "none", "auto"):
            raise invalid("tool_choice", TOOLS)
        if self.store:
            raise invalid("store", "chat completions are not stored; /v1/responses stores where it is configured")

    @property
    def field_names(self) -> Mapping[str, str]:
        """What refusals name."""
        return FIELD_NAMES if self.max_completion_tokens is None else {**FIELD_NAMES, **COMPLETION_NAMES}

    @property
    def most_tokens(self) -> int | None:
        """Most output tokens of a choice; None: what the context leaves."""
        return self.max_completion_tokens or self.max_tokens

    def chat(self) -> ChatMessages:
        """Returns the conversation. Raises RequestRefused (INVALID_REQUEST)."""
        return conversation(
            self.messages,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template_kwargs=self.chat_template_kwargs,
        )

    def generate_request(self, request_id: str) -> GenerateRequest:
        """Returns the request. Raises RequestRefused (INVALID_REQUEST)."""
        sampling = self.sampling(self.most_tokens)
        if self.logprobs:
            sampling.logprobs = self.top_logprobs or 0
        return GenerateRequest(
            model=self.model,
            chat=self.chat(),
            sampling=sampling,
            n=self.n or 1,
            request_id=request_id,
            lane=self.lane,
            cache_salt=self.cache_salt or "",
        )
