"""The body of POST /v1/responses."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import Field

from trunkline.status import invalid
from trunkline.v1.inference_pb2 import ChatMessage, ChatMessages, GenerateRequest, Tool
from trunkline.v1.worker_pb2 import Grammar, GrammarKind
from trunkline_router.edge.chat_messages import TextOrList
from trunkline_router.edge.openai.chat import TopLogprobs
from trunkline_router.edge.openai.generation_fields import GenerationFields
from trunkline_router.edge.output_format import TextFormat
from trunkline_router.edge.request_fields import (
    NOT_YET,
    Constraint,
    Count,
    FieldNames,
    Fields,
    MaxTokens,
    ModelName,
    Steps,
    Strings,
    json_text,
    prompt_named,
    template_variables,
)
from trunkline_router.edge.responses.input_items import InputItem, InputTurn, turns_of
from trunkline_router.edge.tool_fields import (
    CUSTOM,
    ToolChoice,
    ToolName,
    check_kind,
    chosen_tools,
    custom_parameters,
    is_server_tool,
    tool_of,
)
from trunkline_router.prompts.conversation import MAX_TOOLS

MAX_METADATA_PAIRS, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512  # OpenAI's limits, in characters
MAX_ID_CHARACTERS = 256

LOGPROBS = "message.output_text.logprobs"
# The second one is for reasoning that only its server can read: clients ask for it in every request.
INCLUDED = (LOGPROBS, "reasoning.encrypted_content")

FIELD_NAMES = prompt_named(
    "input",
    max_tokens="max_output_tokens",
    **{"chat.max_reasoning_tokens": "reasoning.max_tokens", "chat.reasoning_effort": "reasoning.effort"},
)
PART = re.compile(r"chat\.messages\[(\d+)\]\.parts\[(\d+)\]\.\w+")


class CustomFormat(Fields):
    """What the text for a custom tool is like."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None

    def grammar(self) -> Grammar | None:
        """Returns what is enforced."""
        if not (self.syntax and self.definition):
            return None
        is_lark = self.syntax == "lark"
        kind = GrammarKind.GRAMMAR_KIND_LARK if is_lark else GrammarKind.GRAMMAR_KIND_REGEX
        return Grammar(kind=kind, text=self.definition)

    def description(self) -> str:
        """Returns what the model is told."""
        return f"Must conform to this grammar ({self.syntax}):\n{self.definition}" if self.definition else ""


class ResponseTool(Fields):
    """A function, or a custom tool, which takes a text (`format`), that the model may call. If it is `strict`, calls
    conform to the schema."""

    type: str
    name: ToolName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: CustomFormat | None = None

    ignored: ClassVar[frozenset[str]] = frozenset({"cache_control", "output_schema"})
    unserved: ClassVar[Mapping[str, str]] = {"defer_loading": NOT_YET, "allowed_callers": NOT_YET}
    defaults: ClassVar[Mapping[str, Any]] = {"allowed_callers": ["direct"]}

    def unknown(self, prefix: str = "") -> list[str]:
        if is_server_tool(self.type):
            return []
        if self.type != CUSTOM:
            check_kind(self.type, f"{prefix}type")  # other kinds have other fields: the kind is what is not served
        if self.name is None:
            raise invalid(f"{prefix}name", "field required")
        if self.format is not None and self.type != CUSTOM:
            raise invalid(f"{prefix}format", f"is only allowed in tools of type {CUSTOM!r}")
        return super().unknown(prefix)

    def proto(self, where: str) -> Tool:
        """Returns the tool. Raises RequestRefused (INVALID_REQUEST)."""
        parameters = self.parameters
        if self.type == CUSTOM:
            parameters = custom_parameters(self.format.description() if self.format else "")
        field = f"{where}.parameters"
        tool = tool_of(self.name or "", self.description, parameters, strict=self.strict, field=field)
        if self.format and (grammar := self.format.grammar()):
            tool.input_grammar.CopyFrom(grammar)
        return tool

    def repeated(self) -> dict[str, Any]:
        """Returns the tool as responses repeat it."""
        named: dict[str, Any] = {"type": self.type, "name": self.name, "description": self.description}
        if self.type == CUSTOM:
            form = self.format or CustomFormat(type="text")
            return {**named, "format": form.model_dump(exclude_none=True)}
        named["strict"] = self.strict
        return {**named, "parameters": orjson.Fragment(json_text(self.parameters, "parameters"))}


class TextOptions(Fields):
    """What the output text is like. Models know no levels of verbosity, whatever is asked for."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(Fields):
    """How much a model reasons. Answers have the reasoning itself, without a summary, whatever kind of summary is asked
    for."""

    effort: str | None = None
    max_tokens: Count | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    unserved: ClassVar[Mapping[str, str]] = dict.fromkeys(("generate_summary", "context", "mode"), NOT_YET)
    defaults: ClassVar[Mapping[str, Any]] = {"generate_summary": "auto", "context": "auto", "mode": "standard"}


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
    tools: Annotated[list[ResponseTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
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

    stepwise: ClassVar[str] = "input"
    ignored: ClassVar[frozenset[str]] = GenerationFields.ignored | {"client_metadata"}
    unserved: ClassVar[Mapping[str, str]] = {
        **GenerationFields.unserved,
        "max_tool_calls": f"{NOT_YET}: the router runs no tools",
        "background": NOT_YET,
        "conversation": f"{NOT_YET}: use previous_response_id",
        "prompt": f"{NOT_YET}: prompt templates are not served",
        "context_management": NOT_YET,
        "moderation": NOT_YET,
        "response_format": "is not a field of responses: use text.format",
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
        self._check_choice()

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
    def text_format(self) -> TextFormat:
        """The form of the text."""
        return (self.text and self.text.format) or TextFormat(type="text")

    @property
    def format(self) -> Constraint | None:
        return self.text_format.constraint("text.format")

    @property
    def num_top(self) -> int | None:
        """How many tokens the response lists beside each of the output's; None: it has no log-probabilities."""
        return self.top_logprobs or 0 if LOGPROBS in (self.include or ()) else None

    @property
    def repeated_choice(self) -> ToolChoice:
        """Which tools the model may or must call, as responses repeat it."""
        choice = self.tool_choice or "auto"
        return choice["type"] if isinstance(choice, dict) and choice.keys() == {"type"} else choice

    @property
    def custom_tools(self) -> frozenset[str]:
        """The names of the tools that take a text."""
        return frozenset(tool.name or "" for tool in self.tools or () if tool.type == CUSTOM)

    def left_out(self) -> list[str]:
        return [f"tools[{index}]" for index, tool in enumerate(self.tools or ()) if is_server_tool(tool.type)]

    def turns(self, cut_off: Iterable[str]) -> Steps[Sequence[InputTurn]]:
        """Returns the turns of the input. Raises RequestRefused (INVALID_REQUEST).  cut_off: as for turns_of()"""
        if isinstance(self.input, str):
            return [InputTurn("user", [self.input])]
        return (yield from turns_of(self.input or (), cut_off))

    def generate_request(self, request_id: str, conversation: Iterable[ChatMessage]) -> GenerateRequest:
        """Returns the request to continue a conversation, after the instructions. Raises RequestRefused
        (INVALID_REQUEST)."""
        sampling = self.sampling(max_tokens=self.max_output_tokens, logprobs=self.num_top)
        told = [(index, tool) for index, tool in enumerate(self.tools or ()) if not is_server_tool(tool.type)]
        tools = [tool.proto(f"tools[{index}]") for index, tool in told]
        reasoning = self.reasoning or Reasoning()
        chat = ChatMessages(
            messages=[*self._instructions(), *conversation],
            template_variables=template_variables(self.chat_template_kwargs),
            **chosen_tools(self.tool_choice, tools),
            single_tool_call=self.parallel_tool_calls is False,
            max_reasoning_tokens=reasoning.max_tokens,
            reasoning_effort=reasoning.effort or "",
        )
        return self.generate(request_id, sampling, chat=chat, n=1)

    def _instructions(self) -> list[ChatMessage]:
        return [ChatMessage(role="system", content=self.instructions)] if self.instructions else []

    def field_names(self, num_earlier: int, turns: Sequence[InputTurn]) -> FieldNames:
        """Returns what refusals name.

        num_earlier: how many messages there are before the input's, but instructions
        turns: the input's
        """
        first = len(self._instructions()) + num_earlier

        def named(field: str) -> str:
            found = PART.match(field)
            if found is None:
                return FIELD_NAMES(field).replace("].input_grammar", "].format.definition")
            turn = int(found[1]) - first
            if turn < 0:
                return "previous_response_id"
            return f"input[{turns[turn].items[int(found[2])]}]{field[found.end() :]}"

        return self.named(named)
