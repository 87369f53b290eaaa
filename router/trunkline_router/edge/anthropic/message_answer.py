"""The answers of POST /v1/messages."""

from typing import Any

import orjson

from trunkline.status import RequestRefused
from trunkline.v1.generation_pb2 import FinishReason, OutputChunk
from trunkline.v1.inference_pb2 import GenerateResponse, PromptInfo
from trunkline_router.edge.http.sse import event
from trunkline_router.record.error_statuses import anthropic_body

Json = dict[str, Any]

# An event is put together from parts that are made once: serializing a dictionary for each token takes several times as
# long.
DELTA_HEAD = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":'
)
DELTA_TAIL = b"}}\n\n"


class MessageProgress:
    """What is known of an answer so far.

    max_tokens: what the client asked for
    sees_cache: the client is told how many tokens came from the cache
    """

    def __init__(self, request_id: str, max_tokens: int, *, sees_cache: bool) -> None:
        self.request_id = request_id
        self._max_tokens = max_tokens
        self._sees_cache = sees_cache
        self._model = ""
        self._prompt_tokens = self._cached_tokens = self._output_tokens = 0
        self._last = OutputChunk()

    def begin(self, prompt: PromptInfo) -> None:
        """Takes the prompt's report, which the first response has."""
        self._model = prompt.model
        self._prompt_tokens = prompt.prompt_tokens
        self._cached_tokens = prompt.cached_tokens if self._sees_cache else 0

    def take(self, response: GenerateResponse) -> None:
        """Counts the output of the next response. Raises RequestRefused (NO_WORKER) if it was cancelled."""
        for chunk in response.chunks:
            self._output_tokens += len(chunk.token_ids)
            if chunk.finish_reason:
                self._last = chunk
        if response.HasField("usage"):
            self._output_tokens = response.usage.completion_tokens

    def message(self, content: list[Json]) -> Json:
        """Returns the message object."""
        return {
            "id": f"msg_{self.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            **self.ending(),
            "usage": {
                **self.usage(),
                "cache_creation": None,
                "inference_geo": None,
                "service_tier": "standard",
            },
        }

    def ending(self) -> Json:
        """Returns why the answer ended; its values are null until it has."""
        return {
            "stop_reason": self._stop_reason(),
            "stop_sequence": self._last.stop_string if self._last.HasField("stop_string") else None,
            "stop_details": None,
            "container": None,
        }

    def usage(self) -> Json:
        """Returns the token counts. As Anthropic counts, the tokens that came from the cache are not input tokens."""
        return {
            "input_tokens": self._prompt_tokens - self._cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self._cached_tokens,
            "output_tokens": self._output_tokens,
            "output_tokens_details": None,
            "server_tool_use": None,
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


class WholeMessage:
    """Collects an answer that is not streamed."""

    def __init__(self, progress: MessageProgress) -> None:
        self._progress = progress
        self._texts: list[str] = []

    def take(self, response: GenerateResponse) -> None:
        """Takes the next response. Raises RequestRefused (NO_WORKER)."""
        if response.HasField("prompt"):
            self._progress.begin(response.prompt)
        self._progress.take(response)
        self._texts += [chunk.text for chunk in response.chunks]

    def json(self) -> bytes:
        """Returns the message. An empty answer has an empty block, because clients read the first one."""
        return orjson.dumps(self._progress.message([_block("".join(self._texts))]))


class MessageStream:
    """Writes the events of a streamed answer."""

    def __init__(self, progress: MessageProgress) -> None:
        self._progress = progress

    def events(self, response: GenerateResponse) -> bytes:
        """Returns the events for the next response; empty if it has no text. Raises RequestRefused (NO_WORKER)."""
        opening = b""
        if response.HasField("prompt"):
            self._progress.begin(response.prompt)
            opening = self._opening()
        self._progress.take(response)
        text = "".join([chunk.text for chunk in response.chunks])
        return b"%b%b%b%b" % (opening, DELTA_HEAD, orjson.dumps(text), DELTA_TAIL) if text else opening

    def end(self) -> bytes:
        """Returns the last events."""
        return b"".join(
            (
                _event("content_block_stop", index=0),
                _event("message_delta", delta=self._progress.ending(), usage=self._progress.usage()),
                _event("message_stop"),
            )
        )

    def failed(self, refused: RequestRefused) -> bytes:
        """Returns the event for an error. Nothing follows it: the answer is not whole."""
        return event(anthropic_body(refused, self._progress.request_id), b"error")

    def _opening(self) -> bytes:
        return _event("message_start", message=self._progress.message([])) + _event(
            "content_block_start", index=0, content_block=_block("")
        )


def _block(text: str) -> Json:
    return {"type": "text", "text": text, "citations": None}


def _event(kind: str, **fields: Any) -> bytes:
    return event(orjson.dumps({"type": kind, **fields}), kind.encode())
