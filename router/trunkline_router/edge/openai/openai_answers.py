"""The answers of POST /v1/chat/completions and /v1/completions."""

import asyncio
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import orjson

from trunkline.status import RequestRefused
from trunkline.v1.generation_pb2 import FinishReason, OutputChunk, TokenLogprobs
from trunkline.v1.inference_pb2 import GenerateResponse, PromptInfo, Usage
from trunkline_router.edge.http.sse import DONE, event
from trunkline_router.edge.http_call import HttpCall
from trunkline_router.edge.openai.openai_requests import ChatRequest, CompletionRequest
from trunkline_router.edge.openai.token_details import (
    Json,
    PromptDetails,
    TextOffsets,
    chat_logprobs,
    completion_logprobs,
)
from trunkline_router.record.error_statuses import openai_body

FINISH_REASONS = {
    FinishReason.FINISH_REASON_STOP: "stop",
    FinishReason.FINISH_REASON_LENGTH: "length",
}


def stop_reason(chunk: OutputChunk) -> int | str | None:
    """Returns vLLM's stop_reason: the stop string or the stop token that ended the choice."""
    kind = chunk.WhichOneof("matched")
    return None if kind is None else chunk.stop_string if kind == "stop_string" else chunk.stop_token_id


@dataclass(slots=True)
class CollectedChoice:
    """One choice of an answer that is not streamed."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    last: OutputChunk = field(default_factory=OutputChunk)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def finish_reason(self) -> str:
        return FINISH_REASONS.get(self.last.finish_reason, "stop")


class CollectedAnswer:
    """The whole answer to one prompt. Choices after the first one are made when they arrive: a body may ask for any
    number before the request is checked."""

    def __init__(self) -> None:
        self.choices = [CollectedChoice()]
        self.prompt = PromptInfo()
        self.usage = Usage()

    def take(self, response: GenerateResponse) -> None:
        """Takes the next response."""
        for chunk in response.chunks:
            while chunk.index >= len(self.choices):  # the shared path has checked that the choice was asked for
                self.choices.append(CollectedChoice())
            choice = self.choices[chunk.index]
            choice.texts.append(chunk.text)
            choice.token_ids += chunk.token_ids
            choice.logprobs += chunk.logprobs
            if chunk.finish_reason:
                choice.last = chunk
        if response.HasField("prompt"):
            self.prompt = response.prompt
        if response.HasField("usage"):
            self.usage = response.usage


Request = TypeVar("Request", ChatRequest, CompletionRequest)


class Answer(Generic[Request]):
    """An answer to one or more prompts, as a whole or as events.

    An event with nothing but text is put together from parts that are made once: serializing a dictionary for each
    token takes several times as long.

    prompts: the details of each prompt
    """

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    event_object: ClassVar[str]
    around_text: ClassVar[tuple[bytes, bytes]]  # in the choice of an event that has nothing else

    def __init__(self, call: HttpCall, request: Request, prompts: Sequence[PromptDetails]) -> None:
        self._request: Request = request
        self._prompts = prompts
        self._id, self._created = f"{self.id_prefix}-{call.request_id}", call.created
        self._sees_cache = call.caller.identity.sees_cache  # the caller is told how many tokens came from the cache
        self._num_choices = request.n or 1  # of each prompt
        self._usage, self._has_usage = Usage(), request.includes_usage
        self._collected = [] if request.stream else [CollectedAnswer() for _ in prompts]
        self._is_plain = request.num_top is None and not (request.return_token_ids or request.has_continuous_usage)
        self._model = ""
        self._head = self._before_text = self._tail = b""

    async def whole(self) -> bytes:
        """Returns the whole answer as JSON."""
        choices: list[Json] = []
        usage = self._usage
        for answer, details in zip(self._collected, self._prompts, strict=True):
            usage.prompt_tokens += answer.usage.prompt_tokens
            usage.cached_tokens += answer.usage.cached_tokens
            usage.completion_tokens += answer.usage.completion_tokens
            for collected in answer.choices:
                if choices:
                    await asyncio.sleep(0)  # the log-probabilities of a choice may take long
                choices.append(self._choice(len(choices), collected, details))
        self._model = self._collected[0].prompt.model
        body = self._object(self.whole_object, choices, usage=self._usage_json())
        return orjson.dumps(body | self._beside_choices())

    def _events(self, prompt: int, response: GenerateResponse) -> bytes:
        """Returns the events for the next response to a prompt; empty if it has nothing to tell."""
        parts = []
        if self._has_usage:
            self._count(response)
        if response.HasField("prompt"):
            parts.append(self._opening(prompt, response.prompt.model))
        for chunk in response.chunks:
            index = prompt * self._num_choices + chunk.index
            if chunk.finish_reason or not self._is_plain:
                parts.append(self._full_event(index, chunk, self._prompts[prompt]))
            elif chunk.text or chunk.token_ids:
                text = orjson.dumps(chunk.text)
                parts.append(b"%b%d%b%b%b" % (self._head, index, self._before_text, text, self._tail))
        return b"".join(parts)

    def end(self) -> bytes:
        """Returns the last events."""
        if not self._has_usage:
            return DONE
        return event(orjson.dumps(self._object(self.event_object, [], usage=self._usage_json()))) + DONE

    def failed(self, refused: RequestRefused) -> bytes:
        """Returns the event for an error. Without [DONE]: the answer is not whole."""
        return event(openai_body(refused))

    def _opening(self, prompt: int, model: str) -> bytes:
        """Returns the events before the output of a prompt."""
        if not self._head:
            self._model = model
            start = orjson.dumps(self._object(self.event_object, []))[: -len(b"]}")]
            before, after = self.around_text
            self._head = b'data: %b{"index":' % start
            self._before_text = before
            usage = b',"usage":null' if self._has_usage else b""
            self._tail = b'%b,"logprobs":null,"finish_reason":null}]%b}\n\n' % (after, usage)
        first = prompt * self._num_choices
        indices = range(first, first + self._num_choices)
        return b"".join([self._first_event(index, self._prompts[prompt]) for index in indices])

    def _full_event(self, index: int, chunk: OutputChunk, details: PromptDetails) -> bytes:
        choice: Json = {
            "index": index,
            **self._delta(chunk.text),
            "logprobs": self._logprobs(index, details, chunk.token_ids, chunk.logprobs),
            "finish_reason": FINISH_REASONS.get(chunk.finish_reason),
        }
        if self._request.return_token_ids:
            choice["token_ids"] = list(chunk.token_ids)
        if chunk.finish_reason:
            choice["stop_reason"] = stop_reason(chunk)
        return self._event(choice)

    def _event(self, choice: Json, **more: Any) -> bytes:
        if self._has_usage:
            more["usage"] = self._usage_json() if self._request.has_continuous_usage else None
        return event(orjson.dumps(self._object(self.event_object, [choice], **more)))

    def _object(self, kind: str, choices: list[Json], **more: Any) -> Json:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
            **more,
        }

    def _count(self, response: GenerateResponse) -> None:
        usage = self._usage
        usage.prompt_tokens += response.prompt.prompt_tokens
        usage.cached_tokens += response.prompt.cached_tokens
        usage.completion_tokens += sum(len(chunk.token_ids) for chunk in response.chunks)

    def _usage_json(self) -> Json:
        usage = self._usage
        made: Json = {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        if self._sees_cache:
            made["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
        return made

    # What the two endpoints write differently:

    def _choice(self, index: int, collected: CollectedChoice, details: PromptDetails) -> Json:
        """Returns a whole choice."""
        raise NotImplementedError

    def _beside_choices(self) -> Json:
        """Returns what the whole answer, or its first event, has beside its choices."""
        return {}

    def _first_event(self, index: int, details: PromptDetails) -> bytes:
        """Returns the event before the output of a choice; may be empty."""
        raise NotImplementedError

    def _delta(self, text: str) -> Json:
        """Returns the field of a choice in an event that has its next text."""
        raise NotImplementedError

    def _logprobs(
        self, index: int, details: PromptDetails, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]
    ) -> Json | None:
        """Returns the log-probabilities of the next tokens of a choice; None: the request does not want them."""
        raise NotImplementedError


class ChatAnswer(Answer[ChatRequest]):
    """The answer of POST /v1/chat/completions."""

    id_prefix, whole_object, event_object = "chatcmpl", "chat.completion", "chat.completion.chunk"
    around_text = b',"delta":{"content":', b"}"

    def take(self, response: GenerateResponse) -> None:
        """Takes the next response, for whole()."""
        self._collected[0].take(response)

    def events(self, response: GenerateResponse) -> bytes:
        """Returns the events for the next response; empty if it has nothing to tell."""
        return self._events(0, response)

    def _choice(self, index: int, collected: CollectedChoice, details: PromptDetails) -> Json:
        choice: Json = {
            "index": index,
            "message": {"role": "assistant", "content": collected.text, "refusal": None, "annotations": []},
            "logprobs": self._logprobs(index, details, collected.token_ids, collected.logprobs),
            "finish_reason": collected.finish_reason,
            "stop_reason": stop_reason(collected.last),
        }
        if self._request.return_token_ids:
            choice["token_ids"] = collected.token_ids
        return choice

    def _beside_choices(self) -> Json:
        request, [details] = self._request, self._prompts
        more: Json = {}
        if request.prompt_logprobs is not None:
            more["prompt_logprobs"] = details.logprobs
        if request.return_token_ids:
            more["prompt_token_ids"] = details.ids_json
        return more

    def _first_event(self, index: int, details: PromptDetails) -> bytes:
        delta = {"role": "assistant", "content": "", "refusal": None}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._event(choice, **self._beside_choices() if index == 0 else {})

    def _delta(self, text: str) -> Json:
        return {"delta": {"content": text} if text else {}}

    def _logprobs(
        self, index: int, details: PromptDetails, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]
    ) -> Json | None:
        num_top = self._request.num_top
        if num_top is None or details.tokens is None:
            return None
        return chat_logprobs(details.tokens, entries, num_top)


class CompletionAnswer(Answer[CompletionRequest]):
    """The answer of POST /v1/completions. Each response comes with the number of its prompt."""

    id_prefix, whole_object, event_object = "cmpl", "text_completion", "text_completion"
    around_text = b',"text":', b""

    def __init__(self, call: HttpCall, request: CompletionRequest, prompts: Sequence[PromptDetails]) -> None:
        super().__init__(call, request, prompts)
        self._is_echo = request.max_tokens == 0  # the prompts alone: the token that is computed is left out
        self._is_plain = self._is_plain and not self._is_echo
        self._offsets: dict[int, TextOffsets] = {}  # by choice

    def take(self, item: tuple[int, GenerateResponse]) -> None:
        """Takes the next response, for whole()."""
        self._collected[item[0]].take(item[1])

    def events(self, item: tuple[int, GenerateResponse]) -> bytes:
        """Returns the events for the next response; empty if it has nothing to tell."""
        return self._events(*item)

    def _choice(self, index: int, collected: CollectedChoice, details: PromptDetails) -> Json:
        request = self._request
        if self._is_echo:
            collected = CollectedChoice(last=OutputChunk(finish_reason=FinishReason.FINISH_REASON_LENGTH))
        logprobs = self._logprobs(index, details, collected.token_ids, collected.logprobs)
        choice: Json = {
            "index": index,
            "text": details.text + collected.text if request.echo else collected.text,
            "logprobs": logprobs and {name: [*details.columns.get(name, ()), *logprobs[name]] for name in logprobs},
            "finish_reason": collected.finish_reason,
            "stop_reason": stop_reason(collected.last),
        }
        if request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = details.logprobs
        if request.return_token_ids:
            choice["prompt_token_ids"], choice["token_ids"] = details.ids_json, collected.token_ids
        return choice

    def _first_event(self, index: int, details: PromptDetails) -> bytes:
        request = self._request
        if not (request.echo or request.return_token_ids or request.prompt_logprobs is not None):
            return b""
        choice: Json = {
            "index": index,
            "text": details.text if request.echo else "",
            "logprobs": details.columns or None,
            "finish_reason": None,
        }
        if request.return_token_ids:
            choice["prompt_token_ids"] = details.ids_json
        if request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = details.logprobs
        return self._event(choice)

    def _full_event(self, index: int, chunk: OutputChunk, details: PromptDetails) -> bytes:
        if not self._is_echo:
            return super()._full_event(index, chunk, details)
        if not chunk.finish_reason:
            return b""
        return self._event({"index": index, "text": "", "logprobs": None, "finish_reason": "length"})

    def _delta(self, text: str) -> Json:
        return {"text": text}

    def _logprobs(
        self, index: int, details: PromptDetails, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]
    ) -> Json | None:
        num_top = self._request.num_top
        if num_top is None or details.tokens is None or details.output_offsets is None:
            return None
        if index not in self._offsets:
            self._offsets[index] = copy(details.output_offsets)
        offsets = self._offsets[index].of_output(token_ids)
        return completion_logprobs(details.tokens, token_ids, entries, num_top, offsets)

    def _usage_json(self) -> Json:
        if self._is_echo:
            self._usage.completion_tokens = 0
        return super()._usage_json()
