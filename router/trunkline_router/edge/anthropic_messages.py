"""Anthropic's API: POST /v1/messages and /v1/messages/count_tokens."""

from typing import Any

import orjson

from trunkline.status import RequestRefused
from trunkline.v1.generation_pb2 import FinishReason, OutputChunk
from trunkline.v1.inference_pb2 import GenerateResponse, PromptInfo
from trunkline_router.edge.anthropic_requests import FIELD_NAMES, CountRequest, MessageRequest
from trunkline_router.edge.http.sse import event
from trunkline_router.edge.http_call import HttpCall, answer_of
from trunkline_router.edge.request_fields import refusals_named, validated
from trunkline_router.record.error_statuses import anthropic_body

Json = dict[str, Any]

# An event is put together from parts that are made once: serializing a dictionary for each token takes several times as
# long.
DELTA_HEAD = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":'
)
DELTA_TAIL = b"}}\n\n"


async def messages(call: HttpCall) -> None:
    """POST /v1/messages."""
    async with call.json() as body:
        request: MessageRequest = validated(MessageRequest, body)
        generate = request.generate_request(call.request_id)  # first: other content than text has fields of its own
        call.check_unknown(request.unknown())
        request.check()
    answer = MessageAnswer(call, request.max_tokens)
    responses = answer_of(call, generate, FIELD_NAMES)
    if request.stream:
        await call.stream(responses, answer)
        return
    await call.collect(responses, answer.take)
    await call.respond(answer.whole())


async def count_tokens(call: HttpCall) -> None:
    """POST /v1/messages/count_tokens: the tokens of the prompt that the same fields of /v1/messages make."""
    async with call.json() as body:
        request: CountRequest = validated(CountRequest, body)
        tokenize = request.tokenize_request()
        call.check_unknown(request.unknown())
        request.check()
    with refusals_named(FIELD_NAMES):
        ids = await call.edge.inference.tokenize(tokenize, call.caller, None)
    await call.respond(orjson.dumps({"input_tokens": len(ids)}))


class MessageAnswer:
    """An answer as a whole or as events.

    max_tokens: what the client asked for
    """

    def __init__(self, call: HttpCall, max_tokens: int) -> None:
        self._request_id = call.request_id
        self._max_tokens = max_tokens
        self._sees_cache = call.caller.identity.sees_cache
        self._texts: list[str] = []
        self._prompt = PromptInfo()
        self._output_tokens = 0
        self._last = OutputChunk()

    def take(self, response: GenerateResponse) -> None:
        """Takes the next response, for whole()."""
        self._texts.append(self._text(response))

    def whole(self) -> bytes:
        """Returns the message. An empty answer has an empty block, because clients read the first one."""
        return orjson.dumps(self._message([_block("".join(self._texts))]))

    def events(self, response: GenerateResponse) -> bytes:
        """Returns the events for the next response; empty if it has no text."""
        opening = b""
        if response.HasField("prompt"):
            self._prompt = response.prompt
            opening = self._opening()  # before its output is counted
        text = self._text(response)
        return b"%b%b%b%b" % (opening, DELTA_HEAD, orjson.dumps(text), DELTA_TAIL) if text else opening

    def end(self) -> bytes:
        """Returns the last events."""
        return b"".join(
            (
                _event("content_block_stop", index=0),
                _event("message_delta", delta=self._ending(), usage=self._usage()),
                _event("message_stop"),
            )
        )

    def failed(self, refused: RequestRefused) -> bytes:
        """Returns the event for an error. Nothing follows it: the answer is not whole."""
        return event(anthropic_body(refused, self._request_id), b"error")

    def _text(self, response: GenerateResponse) -> str:
        """Counts the output of the next response, and returns its text."""
        if response.HasField("prompt"):
            self._prompt = response.prompt
        for chunk in response.chunks:
            self._output_tokens += len(chunk.token_ids)
            if chunk.finish_reason:
                self._last = chunk
        if response.HasField("usage"):
            self._output_tokens = response.usage.completion_tokens
        return "".join([chunk.text for chunk in response.chunks])

    def _opening(self) -> bytes:
        return _event("message_start", message=self._message([])) + _event(
            "content_block_start", index=0, content_block=_block("")
        )

    def _message(self, content: list[Json]) -> Json:
        return {
            "id": f"msg_{self._request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._prompt.model,
            "content": content,
            **self._ending(),
            "usage": {
                **self._usage(),
                "cache_creation": None,
                "inference_geo": None,
                "service_tier": "standard",
            },
        }

    def _ending(self) -> Json:
        """Returns why the answer ended; its values are null until it has."""
        return {
            "stop_reason": self._stop_reason(),
            "stop_sequence": self._last.stop_string if self._last.HasField("stop_string") else None,
            "stop_details": None,
            "container": None,
        }

    def _stop_reason(self) -> str | None:
        reason = self._last.finish_reason
        if reason == FinishReason.FINISH_REASON_UNSPECIFIED:
            return None
        if self._last.HasField("stop_string"):
            return "stop_sequence"
        if reason != FinishReason.FINISH_REASON_LENGTH:
            return "end_turn"
        return "max_tokens" if self._output_tokens >= self._max_tokens else "model_context_window_exceeded"

    def _usage(self) -> Json:
        """Returns the token counts. As Anthropic counts, the tokens that came from the cache are not input tokens."""
        cached_tokens = self._prompt.cached_tokens if self._sees_cache else 0
        return {
            "input_tokens": self._prompt.prompt_tokens - cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached_tokens,
            "output_tokens": self._output_tokens,
            "output_tokens_details": None,
            "server_tool_use": None,
        }


def _block(text: str) -> Json:
    return {"type": "text", "text": text, "citations": None}


def _event(kind: str, **fields: Any) -> bytes:
    return event(orjson.dumps({"type": kind, **fields}), kind.encode())
