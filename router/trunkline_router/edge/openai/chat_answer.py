"""The answers of POST /v1/chat/completions."""

from typing import Any

import orjson

from trunkline.status import RequestRefused
from trunkline.v1.generation_pb2 import OutputChunk
from trunkline.v1.inference_pb2 import GenerateResponse
from trunkline_router.edge.http.sse import DONE, event
from trunkline_router.edge.openai.answer import (
    FINISH_REASONS,
    AnswerId,
    CollectedAnswer,
    Json,
    UsageSoFar,
    stop_reason,
    usage_json,
)
from trunkline_router.edge.openai.chat_request import ChatRequest
from trunkline_router.edge.openai.logprobs import chat_logprobs
from trunkline_router.edge.openai.told_prompt import ToldPrompt
from trunkline_router.record.error_statuses import openai_body


def chat_completion(
    request: ChatRequest,
    answer_id: AnswerId,
    answer: CollectedAnswer,
    told: ToldPrompt,
) -> bytes:
    """Returns the whole answer as JSON."""
    choices, names = [], told.names
    for index, collected in enumerate(answer.choices):
        choice: Json = {
            "index": index,
            "message": {"role": "assistant", "content": collected.text, "refusal": None, "annotations": []},
            "logprobs": None,
            "finish_reason": collected.finish_reason,
            "stop_reason": stop_reason(collected.last),
        }
        if request.logprobs and names is not None:
            choice["logprobs"] = chat_logprobs(names, collected.logprobs, request.top_logprobs or 0)
        if request.return_token_ids:
            choice["token_ids"] = collected.token_ids
        choices.append(choice)
    usage = answer.usage
    body: Json = {
        "id": answer_id.id,
        "object": "chat.completion",
        "created": answer_id.created,
        "model": answer.prompt.model,
        "choices": choices,
        "usage": usage_json(
            usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens if answer_id.sees_cache else None
        ),
    }
    if request.prompt_logprobs is not None:
        body["prompt_logprobs"] = told.logprobs
    if request.return_token_ids:
        body["prompt_token_ids"] = told.ids_json
    return orjson.dumps(body)


class ChatStream:
    """Writes the events of a streamed answer.

    An event is put together from parts that are made once: serializing a dictionary for each token takes several times
    as long.
    """

    def __init__(
        self,
        request: ChatRequest,
        answer_id: AnswerId,
        told: ToldPrompt,
    ) -> None:
        self._request = request
        self._answer_id = answer_id
        self._told = told
        self._num_choices = request.n or 1
        self._usage = UsageSoFar()
        self._is_plain = not (request.logprobs or request.return_token_ids or request.has_continuous_usage)
        self._model = ""
        self._head, self._tail = b"", b""

    def events(self, response: GenerateResponse) -> bytes:
        """Returns the events for the next response; empty if it has nothing to tell."""
        self._usage.take(response)
        parts = []
        if response.HasField("prompt"):
            parts.append(self._opening(response))
        for chunk in response.chunks:
            if chunk.text or chunk.token_ids or chunk.finish_reason or not self._is_plain:
                parts.append(self._chunk(chunk))
        return b"".join(parts)

    def end(self) -> bytes:
        """Returns the last events."""
        if not self._request.includes_usage:
            return DONE
        body = self._object([], usage=self._usage.json(sees_cache=self._answer_id.sees_cache))
        return event(orjson.dumps(body)) + DONE

    def failed(self, refused: RequestRefused) -> bytes:
        """Returns the event for an error. Without [DONE]: the answer is not whole."""
        return event(openai_body(refused))

    def _opening(self, response: GenerateResponse) -> bytes:
        model = response.prompt.model
        self._model = model
        head = orjson.dumps(self._object([]))
        end = head.index(b'"choices":[') + len(b'"choices":[')
        self._head = b"data: " + head[:end] + b'{"index":'
        self._tail = b"]" + (b',"usage":null' if self._request.includes_usage else b"") + b"}\n\n"
        events = []
        for index in range(self._num_choices):
            delta = {"role": "assistant", "content": "", "refusal": None}
            body = self._object([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])
            if index == 0 and self._request.prompt_logprobs is not None:
                body["prompt_logprobs"] = self._told.logprobs
            if index == 0 and self._request.return_token_ids:
                body["prompt_token_ids"] = self._told.ids_json
            if self._request.includes_usage:
                body["usage"] = self._continuous_usage()
            events.append(event(orjson.dumps(body)))
        return b"".join(events)

    def _chunk(self, chunk: OutputChunk) -> bytes:
        if self._is_plain and not chunk.finish_reason:
            text = orjson.dumps(chunk.text)
            return b'%b%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}%b' % (
                self._head,
                chunk.index,
                text,
                self._tail,
            )
        delta: Json = {"content": chunk.text} if chunk.text else {}
        choice: Json = {
            "index": chunk.index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": FINISH_REASONS.get(chunk.finish_reason),
        }
        if self._request.logprobs and self._told.names is not None:
            choice["logprobs"] = chat_logprobs(self._told.names, chunk.logprobs, self._request.top_logprobs or 0)
        if self._request.return_token_ids:
            choice["token_ids"] = list(chunk.token_ids)
        if chunk.finish_reason:
            choice["stop_reason"] = stop_reason(chunk)
        body = self._object([choice])
        if self._request.includes_usage:
            body["usage"] = self._continuous_usage()
        return event(orjson.dumps(body))

    def _continuous_usage(self) -> Json | None:
        if not self._request.has_continuous_usage:
            return None
        return self._usage.json(sees_cache=self._answer_id.sees_cache)

    def _object(self, choices: list[Json], **more: Any) -> Json:
        return {
            "id": self._answer_id.id,
            "object": "chat.completion.chunk",
            "created": self._answer_id.created,
            "model": self._model,
            "choices": choices,
            **more,
        }
