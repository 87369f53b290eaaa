"""POST /v1/chat/completions: its body, and its answer."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Annotated, ClassVar

from pydantic import Field

from trunkline.answer.answer_items import calls_tools
from trunkline.sampling_params import MAX_TOP_LOGPROBS
from trunkline.status import invalid
from trunkline.v1.generation_pb2 import OutputChunk
from trunkline.v1.inference_pb2 import AnswerPart, GenerateRequest, GenerateResponse, PromptInfo
from trunkline_router.edge.http_call import CollectedAnswer, HttpCall, answer_of
from trunkline_router.edge.openai.chat_fields import (
    CHAT_NAMES,
    MAX_COMPLETION_NAMES,
    NO_AUDIO,
    OLD_CALLS,
    ChatFields,
    Messages,
)
from trunkline_router.edge.openai.chat_parts import Deltas, message_of
from trunkline_router.edge.openai.generation_fields import GenerationFields
from trunkline_router.edge.openai.openai_answer import Json, OpenAiAnswer
from trunkline_router.edge.openai.token_details import LogprobsBound, PromptDetails, chat_logprobs
from trunkline_router.edge.output_format import ResponseFormat
from trunkline_router.edge.request_fields import (
    NOT_YET,
    Constraint,
    FieldNames,
    MaxTokens,
    ModelName,
    Steps,
    Strings,
)
from trunkline_router.prompts.conversation import TEXT_ALONE
from trunkline_router.request.request_call import NO_EXTRAS, Extras

TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]


async def chat_completions(call: HttpCall) -> None:
    """POST /v1/chat/completions."""
    request = await call.body(ChatRequest)
    call.edge.inference.preparer.check_choices(request.n or 1)
    generate = await call.converted(request, request.generate_request(call.request_id))
    details = request.details()
    extras = NO_EXTRAS if details is None else Extras(on_admission=partial(details.find, call))
    responses = answer_of(call, generate, request.field_names, extras)
    if details is not None and request.prompt_logprobs is not None:
        responses = details.scored(responses)
    await call.answer(responses, ChatAnswer(call, request, details), streams=request.stream)


class ChatRequest(ChatFields, GenerationFields):
    """A conversation to continue."""

    model: ModelName
    messages: Messages
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    store: bool | None = None
    response_format: ResponseFormat | None = None
    modalities: Strings | None = None
    include_reasoning: bool | None = None  # as vLLM names it

    unserved: ClassVar[Mapping[str, str]] = {
        **GenerationFields.unserved,
        **dict.fromkeys(("functions", "function_call"), OLD_CALLS),
        **dict.fromkeys(("prediction", "verbosity", "web_search_options"), NOT_YET),
        "audio": NO_AUDIO,
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
        if self.modalities not in (None, ["text"]):
            raise invalid("modalities", "only text is served")
        if self.store:
            raise invalid("store", "chat completions are not stored; /v1/responses stores where it is configured")

    @property
    def format(self) -> Constraint | None:
        return None if self.response_format is None else self.response_format.constraint("response_format")

    @property
    def field_names(self) -> FieldNames:
        """What refusals name."""
        return self.named(CHAT_NAMES if self.max_completion_tokens is None else MAX_COMPLETION_NAMES)

    @property
    def num_top(self) -> int | None:
        """How many tokens the answer lists beside each of the output's; None: it has no log-probabilities."""
        return self.top_logprobs or 0 if self.logprobs else None

    def generate_request(self, request_id: str) -> Steps[GenerateRequest]:
        """Returns the request. Raises RequestRefused (INVALID_REQUEST)."""
        sampling = self.sampling(max_tokens=self.max_completion_tokens or self.max_tokens, logprobs=self.num_top)
        return self.generate(request_id, sampling, chat=(yield from self.chat()), n=self.n or 1)

    def details(self) -> PromptDetails | None:
        """Returns what holds the answer's details of tokens; None: it has none."""
        prompt_top = self.prompt_logprobs
        if prompt_top is None and not (self.logprobs or self.return_token_ids):
            return None
        bound = None if prompt_top is None else LogprobsBound("prompt_logprobs", prompt_top + 1)
        return PromptDetails(self, bound, has_logprobs=bool(self.logprobs))


class ChatAnswer(OpenAiAnswer):
    """The answer, as a whole or as events."""

    id_prefix, whole_object, event_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, call: HttpCall, request: ChatRequest, details: PromptDetails | None) -> None:
        super().__init__(call, request)
        self._details = details
        self._num_choices = request.n or 1
        self._num_top = request.num_top
        self._reasoning = "" if request.include_reasoning is False else call.edge.reasoning_field
        self._collected = CollectedAnswer()
        self._deltas: list[Deltas] = []  # of a stream's choices, if its answer has parts
        self._in_text: set[int] = set()  # choices whose next text is their delta as it is

    def take(self, response: GenerateResponse) -> None:
        self._collected.take(response)

    async def whole(self) -> bytes:
        collected = self._collected
        choices = []
        for index, output in enumerate(collected.choices):
            if index:
                await asyncio.sleep(0)  # the log-probabilities of a choice may take long
            items = collected.items(index)
            message = message_of(output.text, items, self._reasoning)
            choice = {"index": index, "message": message, "logprobs": self._logprobs(output)}
            choices.append(choice | self._chat_ending(output, calls=calls_tools(items)))
        return self._whole(collected.prompt.model, choices, collected.usage, **self._of_prompt())

    def events(self, response: GenerateResponse) -> bytes:
        """Returns the events for the next response; empty if it has nothing to tell."""
        if self._has_usage:
            self._count(response)
        events = self._opening(response.prompt) if response.HasField("prompt") else []
        in_text, has_read_parts = self._in_text, False
        for chunk in response.chunks[:]:  # a slice takes half the time
            index, text, is_last = chunk.index, chunk.text, chunk.finish_reason
            if text:
                delta: Json = {"content": text if index in in_text else self._first_text(index, text)}
            elif self._deltas:
                delta = {}
                if not has_read_parts:  # only chunks without text have parts (AnswerContext.text_stays)
                    has_read_parts = True
                    events += self._part_events(response.parts)
            else:
                delta = {"content": ""} if chunk.token_ids and not is_last else {}
            if delta or is_last or self._details is not None:
                events.append(self._chunk_event(index, chunk, delta))
        return b"".join(events)

    def _first_text(self, index: int, text: str) -> str:
        """Returns the delta's text where text begins."""
        self._in_text.add(index)
        return self._deltas[index].text.of(text) if self._deltas else text

    def _part_events(self, parts: Iterable[AnswerPart]) -> Iterator[bytes]:
        self._in_text.clear()
        for part in parts:
            if delta := self._deltas[part.index].of(part):
                yield self._event(_choice(part.index, delta))

    def _chunk_event(self, index: int, chunk: OutputChunk, delta: Json) -> bytes:
        """Returns the event for a choice's chunk: what it tells of tokens and of its end, beside this delta."""
        choice = _choice(index, delta)
        if chunk.finish_reason or self._details is not None:
            calls = bool(self._deltas) and self._deltas[index].calls_tools
            choice |= self._chat_ending(chunk, calls=calls)
            choice["logprobs"] = self._logprobs(chunk)
        return self._event(choice)

    def _chat_ending(self, output: OutputChunk, *, calls: bool) -> Json:
        """As _ending().  calls: whether the client should run calls of the choice, if it was not cut off"""
        ending = self._ending(output)
        if calls and ending.get("finish_reason") == "stop":
            ending["finish_reason"] = "tool_calls"
        return ending

    def _opening(self, prompt: PromptInfo) -> list[bytes]:
        """Returns the events before the output."""
        self._begin(prompt.model)
        if prompt.answer_format:
            self._deltas = [Deltas(self._reasoning) for _ in range(self._num_choices)]
        delta = {"role": "assistant", "content": "", "refusal": None}
        choices = [_choice(index, delta) for index in range(self._num_choices)]
        return [self._event(choices[0], self._of_prompt()), *map(self._event, choices[1:])]

    def _of_prompt(self) -> Json:
        return {} if self._details is None else self._details.fields()

    def _logprobs(self, output: OutputChunk) -> Json | None:
        """Returns the log-probabilities of tokens; None: the request does not want them."""
        if self._num_top is None or self._details is None or self._details.names is None:
            return None
        return chat_logprobs(self._details.names, output.logprobs, self._num_top)


def _choice(index: int, delta: Json) -> Json:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
