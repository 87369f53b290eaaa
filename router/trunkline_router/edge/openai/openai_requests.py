"""The bodies of OpenAI's endpoints, and of vLLM's /tokenize and /detokenize."""

from array import array
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Union

from pydantic import Field, WithJsonSchema

from trunkline.status import invalid
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.inference_pb2 import ChatMessage, ChatMessages, GenerateRequest, TokenizeRequest
from trunkline_router.edge.request_fields import (
    GUIDED,
    NOT_YET,
    TEXT_ALONE,
    TOOLS,
    FieldNames,
    Fields,
    GenerationFields,
    MaxTokens,
    ModelName,
    Strings,
    prompt_named,
    template_variables,
)
from trunkline_router.prompts.chat_template import MAX_MESSAGES

MAX_TOP_LOGPROBS = 20
MAX_PARTS = 4096  # of a message
MAX_PROMPTS = 256
DEFAULT_MAX_TOKENS = 16  # of a completion; OpenAI's
NO_AUDIO = "is not supported: audio is not served"
# Templates know "system", which developers' instructions were called before.
ROLES = {"developer": "system"}

TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]


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

    def plain(self, where: str) -> str:
        """Returns the part's text. Raises RequestRefused (INVALID_REQUEST) for other kinds of content."""
        if self.type in ("text", "input_text", "output_text") and self.text is not None:
            return self.text
        if self.type == "refusal" and self.refusal is not None:
            return self.refusal
        raise invalid(where, f"content of type {self.type[:32]!r} {TEXT_ALONE}")


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
        "audio": NO_AUDIO,
        "reasoning": NOT_YET,
        "reasoning_content": NOT_YET,
    }

    def proto(self, where: str) -> ChatMessage:
        """Returns the message for the chat template. Raises RequestRefused (INVALID_REQUEST)."""
        if self.role in ("tool", "function"):
            raise invalid(f"{where}.role", f"{self.role!r} {TOOLS}")
        return ChatMessage(role=ROLES.get(self.role, self.role), content=plain_text(self.content, f"{where}.content"))


Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]


def plain_text(content: str | Sequence[Part] | None, where: str) -> str:
    """Returns the text of a content, parts joined by newlines as in vLLM. Raises RequestRefused (INVALID_REQUEST)."""
    if isinstance(content, str):
        return content
    return "\n".join(part.plain(f"{where}[{index}]") for index, part in enumerate(content or ()))


class ChatFields(Fields):
    """A conversation, and how the model's template writes it."""

    messages: Messages | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def chat(self) -> ChatMessages:
        """Returns the conversation for the chat template. Raises RequestRefused (INVALID_REQUEST)."""
        adds_prompt = self.add_generation_prompt
        return ChatMessages(
            messages=[message.proto(f"messages[{index}]") for index, message in enumerate(self.messages or ())],
            add_generation_prompt=False if adds_prompt is None and self.continue_final_message else adds_prompt,
            continue_final_message=bool(self.continue_final_message),
            template_variables=template_variables(self.chat_template_kwargs),
        )


class ChatRequest(ChatFields, GenerationFields):
    """A conversation to continue."""

    model: ModelName
    messages: Messages
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
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
        "audio": NO_AUDIO,
        "prediction": NOT_YET,
        "reasoning_effort": NOT_YET,
        "verbosity": NOT_YET,
        "web_search_options": NOT_YET,
        "documents": NOT_YET,
        "echo": "is not supported for chat completions",
        "chat_template": "is not supported: the model's own template is used",
        "mm_processor_kwargs": TEXT_ALONE,
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
    def field_names(self) -> FieldNames:
        """What refusals name."""
        return CHAT_NAMES if self.max_completion_tokens is None else MAX_COMPLETION_NAMES

    @property
    def num_top(self) -> int | None:
        """How many tokens the answer lists beside each of the output's; None: it has no log-probabilities."""
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def prompt_top(self) -> int | None:
        """The same for the tokens of the prompt."""
        return self.prompt_logprobs

    def generate_request(self, request_id: str) -> GenerateRequest:
        """Returns the request. Raises RequestRefused (INVALID_REQUEST)."""
        sampling = self.sampling(max_tokens=self.max_completion_tokens or self.max_tokens, logprobs=self.num_top)
        return self.generate(request_id, sampling, chat=self.chat(), n=self.n or 1)


CHAT_NAMES = prompt_named("messages")
MAX_COMPLETION_NAMES = prompt_named("messages", max_tokens="max_completion_tokens")


_IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_SOME_IDS_SCHEMA = {**_IDS_SCHEMA, "minItems": 1}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
        _SOME_IDS_SCHEMA,
        {"type": "array", "items": _SOME_IDS_SCHEMA, "minItems": 1, "maxItems": MAX_PROMPTS},
    ]
}

GivenPrompt = str | list[Any]  # a text, or token ids as JSON has them
Prompt = Union[str, "array[int]"]


class CompletionRequest(GenerationFields):
    """Prompts to continue."""

    model: ModelName
    # Checked by prompts(): pydantic would try every alternative on long lists.
    prompt: Annotated[Any, WithJsonSchema(_PROMPT_SCHEMA)]
    max_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    echo: bool | None = None
    logprobs: TopLogprobs | None = None
    add_special_tokens: bool | None = None

    long_lists: ClassVar[frozenset[str]] = frozenset({"prompt"})
    unserved: ClassVar[Mapping[str, str]] = {**GenerationFields.unserved, "suffix": "is not supported"}

    def check(self) -> None:
        super().check()
        if self.max_tokens == 0 and not self.echo:
            raise invalid("max_tokens", "must be at least 1 unless echo is true")
        if self.echo and self.stream and self.prompt_logprobs is not None:
            raise invalid("prompt_logprobs", "is not supported for a stream with echo")

    @property
    def field_names(self) -> FieldNames:
        """What refusals name. Prompts are scored for `logprobs` with an echo, too."""
        return COMPLETION_NAMES if self.prompt_logprobs is not None else ECHO_NAMES

    @property
    def num_top(self) -> int | None:
        """How many tokens the answer lists beside each of the output's; None: it has no log-probabilities."""
        return self.logprobs

    @property
    def prompt_top(self) -> int | None:
        """The same for the tokens of the prompts."""
        if self.echo and self.logprobs is not None:
            return max(self.logprobs, self.prompt_logprobs or 0)
        return self.prompt_logprobs

    def prompts(self) -> list[GivenPrompt]:
        """Returns the prompts, each a text or token ids, of which the first alone is checked. Raises RequestRefused
        (INVALID_REQUEST)."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt, list) and prompt:
            if type(prompt[0]) is int:
                return [prompt]
            if len(prompt) > MAX_PROMPTS:
                raise invalid("prompt", f"{len(prompt)} prompts are more than {MAX_PROMPTS}")
            kinds = set(map(type, prompt))
            if kinds == {str} or (kinds == {list} and all(item and type(item[0]) is int for item in prompt)):
                return prompt
        raise invalid("prompt", "must be a string, a list of strings, token ids, or a list of lists of token ids")

    def sampling_params(self) -> SamplingParams:
        """Returns the parameters, which are the same for all prompts. One token is computed even if none is wanted, and
        left out of the answer."""
        max_tokens = DEFAULT_MAX_TOKENS if self.max_tokens is None else max(1, self.max_tokens)
        return self.sampling(max_tokens=max_tokens, prompt_logprobs=self.prompt_top)

    def generate_request(self, prompt: Prompt, request_id: str, sampling: SamplingParams) -> GenerateRequest:
        """Returns the request for one of the prompts, without it if it is token ids."""
        text = prompt if isinstance(prompt, str) else None
        return self.generate(request_id, sampling, text=text, n=self.n or 1, fit_max_tokens=self.max_tokens is None)


COMPLETION_NAMES = prompt_named("prompt")
ECHO_NAMES = prompt_named("prompt", prompt_logprobs="logprobs")


class TokenizeBody(ChatFields):
    """A text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @property
    def field_names(self) -> FieldNames:
        """What refusals name."""
        return COMPLETION_NAMES if self.messages is None else CHAT_NAMES

    def tokenize_request(self) -> TokenizeRequest:
        """Returns the request. Raises RequestRefused (INVALID_REQUEST)."""
        if (self.prompt is None) == (self.messages is None):
            raise invalid("prompt", "exactly one of prompt and messages must be given")
        if self.messages is not None and self.add_special_tokens:
            raise invalid("add_special_tokens", "is for prompts: a chat template writes the special tokens itself")
        request = TokenizeRequest(model=self.model or "", omit_special_tokens=self.add_special_tokens is False)
        if self.messages is None:
            request.text = self.prompt or ""
        else:
            request.chat.CopyFrom(self.chat())
        return request


class DetokenizeBody(Fields):
    """Token ids."""

    model: str | None = None
    tokens: Annotated[Any, WithJsonSchema(_IDS_SCHEMA)]

    long_lists: ClassVar[frozenset[str]] = frozenset({"tokens"})
