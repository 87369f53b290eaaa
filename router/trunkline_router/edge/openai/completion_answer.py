"""The answers of POST /v1/completions."""

import asyncio
from collections.abc import Sequence
from copy import copy
from typing import Any

import orjson

from trunkline.status import RequestRefused
from trunkline.v1.generation_pb2 import OutputChunk, TokenLogprobs
from trunkline.v1.inference_pb2 import GenerateResponse
from trunkline_router.edge.http.sse import DONE, event
from trunkline_router.edge.openai.answer import (
    FINISH_REASONS,
    AnswerId,
    CollectedAnswer,
    CollectedChoice,
    Json,
    UsageSoFar,
    stop_reason,
)
from trunkline_router.edge.openai.completion_request import CompletionRequest
from trunkline_router.edge.openai.logprobs import completion_logprobs
from trunkline_router.edge.openai.text_offsets import TextOffsets
from trunkline_router.edge.openai.told_prompt import ToldPrompt
from trunkline_router.record.error_statuses import openai_body


async def completion(
    request: CompletionRequest,
    answer_id: AnswerId,
    answers: Sequence[CollectedAnswer],
    told: Sequence[ToldPrompt],
) -> bytes:
    """Returns the whole answer as JSON."""
    choices: list[Json] = []
    usage = UsageSoFar()
    for answer, prompt in zip(answers, told, strict=True):
        usage.prompt_tokens += answer.usage.prompt_tokens
        usage.cached_tokens += answer.usage.cached_tokens
        usage.completion_tokens += 0 if request.max_tokens == 0 else answer.usage.completion_tokens
        for collected in answer.choices:
            await asyncio.sleep(0)  # the log-probabilities of a choice may take long
            choices.append(_choice(request, len(choices), collected, prompt))
    body = {
        "id": answer_id.id,
        "object": "text_completion",
        "created": answer_id.created,
        "model": answers[0].prompt.model,
        "choices": choices,
        "usage": usage.json(sees_cache=answer_id.sees_cache),
    }
    return orjson.dumps(body)


def _choice(
    request: CompletionRequest,
    index: int,
    collected: CollectedChoice,
    told: ToldPrompt,
) -> Json:
    only_echo, offsets = request.max_tokens == 0, told.output_offsets
    text = "" if only_echo else collected.text
    ids: list[int] = [] if only_echo else collected.token_ids
    entries: list[TokenLogprobs] = [] if only_echo else collected.logprobs
    choice: Json = {
        "index": index,
        "text": told.text + text if request.echo else text,
        "logprobs": None,
        "finish_reason": "length" if only_echo else collected.finish_reason,
        "stop_reason": None if only_echo else stop_reason(collected.last),
    }
    if request.logprobs is not None and told.names is not None and offsets is not None:
        at = copy(offsets).of_output(ids)
        columns = completion_logprobs(told.names, ids, entries, num_top=request.logprobs, offsets=at)
        choice["logprobs"] = {name: [*told.columns.get(name, ()), *column] for name, column in columns.items()}
    if request.prompt_logprobs is not None:
        choice["prompt_logprobs"] = told.logprobs
    if request.return_token_ids:
        choice |= {
            "prompt_token_ids": told.ids_json,
            "token_ids": [] if only_echo else collected.token_ids,
        }
    return choice


class CompletionStream:
    """Writes the events of a streamed answer to one or more prompts."""

    def __init__(
        self,
        request: CompletionRequest,
        answer_id: AnswerId,
        told: Sequence[ToldPrompt],
    ) -> None:
        self._request = request
        self._answer_id = answer_id
        self._told = told
        self._num_choices = request.n or 1
        self._usage = UsageSoFar()
        self._offsets: dict[int, TextOffsets] = {}
        self._is_plain = request.logprobs is None and not (request.return_token_ids or request.has_continuous_usage)
        self._model = ""
        self._head, self._tail = b"", b""

    def events(self, item: tuple[int, GenerateResponse]) -> bytes:
        """Returns the events for the next response, which comes with the number of its prompt; empty if it has nothing
        to tell."""
        prompt, response = item
        self._usage.take(response)
        parts = []
        if response.HasField("prompt"):
            parts.append(self._opening(response, prompt))
        for chunk in response.chunks:
            if chunk.text or chunk.token_ids or chunk.finish_reason or not self._is_plain:
                parts.append(self._chunk(chunk, prompt * self._num_choices + chunk.index))
        return b"".join(parts)

    def end(self) -> bytes:
        """Returns the last events."""
        if not self._request.includes_usage:
            return DONE
        if self._request.max_tokens == 0:
            self._usage.completion_tokens = 0
        body = self._object([], usage=self._usage.json(sees_cache=self._answer_id.sees_cache))
        return event(orjson.dumps(body)) + DONE

    def failed(self, refused: RequestRefused) -> bytes:
        """Returns the event for an error. Without [DONE]: the answer is not whole."""
        return event(openai_body(refused))

    def _opening(self, response: GenerateResponse, prompt: int) -> bytes:
        if not self._head:
            self._model = response.prompt.model
            head = orjson.dumps(self._object([]))
            end = head.index(b'"choices":[') + len(b'"choices":[')
            self._head = b"data: " + head[:end] + b'{"index":'
            self._tail = b"]" + (b',"usage":null' if self._request.includes_usage else b"") + b"}\n\n"
        request, told = self._request, self._told[prompt]
        events = []
        for index in range(prompt * self._num_choices, (prompt + 1) * self._num_choices):
            if told.output_offsets is not None:
                self._offsets[index] = copy(told.output_offsets)
            if not (request.echo or request.return_token_ids or request.prompt_logprobs is not None):
                continue
            choice: Json = {"index": index, "text": told.text if request.echo else "", "logprobs": told.columns or None}
            choice["finish_reason"] = None
            if request.return_token_ids:
                choice["prompt_token_ids"] = told.ids_json
            if request.prompt_logprobs is not None:
                choice["prompt_logprobs"] = told.logprobs
            events.append(self._event(choice))
        return b"".join(events)

    def _chunk(self, chunk: OutputChunk, index: int) -> bytes:
        if self._is_plain and not chunk.finish_reason:
            text = orjson.dumps(chunk.text)
            return b'%b%d,"text":%b,"logprobs":null,"finish_reason":null}%b' % (self._head, index, text, self._tail)
        if self._request.max_tokens == 0:
            if not chunk.finish_reason:
                return b""
            choice: Json = {"index": index, "text": "", "logprobs": None, "finish_reason": "length"}
            return self._event(choice)
        choice = {
            "index": index,
            "text": chunk.text,
            "logprobs": None,
            "finish_reason": FINISH_REASONS.get(chunk.finish_reason),
        }
        names = self._told[index // self._num_choices].names
        if self._request.logprobs is not None and names is not None:
            at = self._offsets[index].of_output(chunk.token_ids)
            choice["logprobs"] = completion_logprobs(
                names, chunk.token_ids, chunk.logprobs, num_top=self._request.logprobs, offsets=at
            )
        if self._request.return_token_ids:
            choice["token_ids"] = list(chunk.token_ids)
        if chunk.finish_reason:
            choice["stop_reason"] = stop_reason(chunk)
        return self._event(choice)

    def _event(self, choice: Json) -> bytes:
        body = self._object([choice])
        if self._request.includes_usage:
            continuous = self._request.has_continuous_usage
            body["usage"] = self._usage.json(sees_cache=self._answer_id.sees_cache) if continuous else None
        return event(orjson.dumps(body))

    def _object(self, choices: list[Json], **more: Any) -> Json:
        return {
            "id": self._answer_id.id,
            "object": "text_completion",
            "created": self._answer_id.created,
            "model": self._model,
            "choices": choices,
            **more,
        }
