"""The body of POST /v1/responses."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from trunkline.status import invalid
from trunkline.v1.inference_pb2 import ChatMessage, ChatMessages, GenerateRequest
from trunkline_router.edge.chat_messages import TextOrList, chat_message, pieces
from trunkline_router.edge.openai.chat import TopLogprobs
from trunkline_router.edge.openai.chat_fields import Part
from trunkline_router.edge.request_fields import (
    GUIDED,
    NOT_YET,
    TOOLS,
    Fields,
    GenerationFields,
    MaxTokens,
    ModelName,
    Strings,
    prompt_named,
    template_variables,
)

MAX_METADATA_PAIRS, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512  # OpenAI's limits, in characters
MAX_ID_CHARACTERS = 256

LOGPROBS = "message.output_text.logprobs"
# The second one is for reasoning, which no answer has: clients ask for it in every request.
INCLUDED = (LOGPROBS, "reasoning.encrypted_content")
TEXT_PARTS = ("input_text", "output_text", "text")

FIELD_NAMES = prompt_named("input", max_tokens="max_output_tokens")


class InputPart(Part):
    """A part of a message's content."""

    def unknown(self, prefix: str = "") -> list[str]:
        if self.type in TEXT_PARTS and self.text is None:
            raise invalid(f"{prefix}text", "is missing")
        self.piece(prefix.removesuffix("."))  # other kinds have other fields: the kind is what is not served
        return super().unknown(prefix)


class InputItem(Fields):
    """A message, with or without a type. Messages of earlier answers come back as they were sent to the client."""

    type: str | None = None
    role: Literal["developer", "system", "user", "assistant"] | None = None
    content: TextOrList[InputPart] | None = None

    ignored: ClassVar[frozenset[str]] = frozenset({"id", "status", "phase"})

    def unknown(self, prefix: str = "") -> list[str]:
        self._check_kind(prefix)
        return super().unknown(prefix)

    def proto(self, where: str) -> ChatMessage:
        """Returns the message for the chat template. Raises RequestRefused (INVALID_REQUEST)."""
        return chat_message(self.role or "user", pieces(self.content, f"{where}.content"))

    def _check_kind(self, prefix: str) -> None:
        """Raises RequestRefused (INVALID_REQUEST) for items that are not messages, or lack something."""
        kind = self.type
        if kind == "item_reference":
            raise invalid(f"{prefix}type", f"{kind!r} {NOT_YET}: send the item itself, or previous_response_id")
        if kind not in (None, "message"):
            reason = TOOLS if "call" in kind or "mcp" in kind else NOT_YET
            raise invalid(f"{prefix}type", f"{kind[:32]!r} {reason}")
        if self.role is None or self.content is None:
            raise invalid(f"{prefix}{'content' if self.role else 'role'}", "is missing")


class TextFormat(Fields):
    """The form of the output."""

    type: str
    ignored: ClassVar[frozenset[str]] = frozenset({"schema", "name", "strict", "description"})  # the type is refused


class TextOptions(Fields):
    """What the output text is like."""

    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(Fields):
    """How much a model reasons. The models that are served do not: only what asks for none is accepted."""

    effort: str | None = None
    unserved: ClassVar[Mapping[str, str]] = {"summary": NOT_YET, "generate_summary": NOT_YET}


class ResponseRequest(GenerationFields):
    """A text or a conversation to answer."""

    model: ModelName
    input: TextOrList[InputItem] | None = None
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=MAX_ID_CHARACTERS)] | None = None
    max_output_tokens: MaxTokens | None = None
    top_logprobs: TopLogprobs | None = None
    include: Strings | None = None
    store: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    truncation: str | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Repeated in the response.
    metadata: (
        Annotated[
            dict[
                Annotated[str, Field(max_length=MAX_METADATA_KEY)], Annotated[str, Field(max_length=MAX_METADATA_VALUE)]
            ],
            Field(max_length=MAX_METADATA_PAIRS),
        ]
        | None
    ) = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    unserved: ClassVar[Mapping[str, str]] = {
        **GenerationFields.unserved,
        "tools": TOOLS,
        "max_tool_calls": TOOLS,
        "background": NOT_YET,
        "conversation": f"{NOT_YET}: use previous_response_id",
        "prompt": f"{NOT_YET}: prompt templates are not served",
        "context_management": NOT_YET,
        "moderation": NOT_YET,
        "messages": "is not a field of responses: use input",
        "max_tokens": "is not a field of responses: use max_output_tokens",
        "max_completion_tokens": "is not a field of responses: use max_output_tokens",
    }

    def check(self) -> None:
        super().check()
        if not self.input and self.previous_response_id is None:
            raise invalid("input", "is missing or empty")
        for name in self.include or ():
            if name not in INCLUDED:
                raise invalid("include", f"{name[:64]!r} {NOT_YET}")
        if self.top_logprobs and self.num_top is None:
            raise invalid("top_logprobs", f"needs include: [{LOGPROBS!r}]")
        if self.truncation not in (None, "disabled"):
            raise invalid(
                "truncation", f"{self.truncation[:32]!r} {NOT_YET}: a conversation that is too long is refused"
            )
        if self.tool_choice not in (None, "none", "auto"):
            raise invalid("tool_choice", TOOLS)
        self._check_choice()
        if self.text is not None and self.text.format is not None and self.text.format.type != "text":
            raise invalid("text.format", GUIDED)
        if self.text is not None and self.text.verbosity not in (None, "medium"):
            raise invalid("text.verbosity", NOT_YET)
        if self.reasoning is not None and self.reasoning.effort not in (None, "none"):
            raise invalid("reasoning.effort", "is not supported: the models that are served do not reason")

    def _check_choice(self) -> None:
        """Refuses what chat completions have and this API has no place for."""
        if self.prompt_logprobs is not None:
            raise invalid("prompt_logprobs", "is not supported for responses")
        if self.return_token_ids:
            raise invalid("return_token_ids", "is not supported for responses")
        if self.n not in (None, 1):
            raise invalid("n", "is not supported for responses, which have one choice")
        if self.has_continuous_usage:
            raise invalid("stream_options.continuous_usage_stats", "is not supported for responses")

    @property
    def num_top(self) -> int | None:
        """How many tokens the response lists beside each of the output's; None: it has no log-probabilities."""
        return self.top_logprobs or 0 if LOGPROBS in (self.include or ()) else None

    def messages(self) -> list[ChatMessage]:
        """Returns the messages of the input. Raises RequestRefused (INVALID_REQUEST)."""
        if isinstance(self.input, str):
            return [ChatMessage(role="user", content=self.input)]
        return [item.proto(f"input[{index}]") for index, item in enumerate(self.input or ())]

    def generate_request(self, request_id: str, conversation: Iterable[ChatMessage]) -> GenerateRequest:
        """Returns the request to continue a conversation, after the instructions. Raises RequestRefused
        (INVALID_REQUEST)."""
        sampling = self.sampling(max_tokens=self.max_output_tokens, logprobs=self.num_top)
        instructions = [ChatMessage(role="system", content=self.instructions)] if self.instructions else []
        chat = ChatMessages(
            messages=[*instructions, *conversation],
            template_variables=template_variables(self.chat_template_kwargs),
        )
        return self.generate(request_id, sampling, chat=chat, n=1)
