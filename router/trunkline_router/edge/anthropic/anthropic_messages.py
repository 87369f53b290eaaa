"""Anthropic's API: POST /v1/messages and /v1/messages/count_tokens."""

import orjson

from trunkline.answer.answer_items import calls_tools
from trunkline.status import RequestRefused
from trunkline.v1.generation_pb2 import FinishReason, OutputChunk
from trunkline.v1.inference_pb2 import GenerateResponse
from trunkline_router.edge.anthropic.answer_blocks import (
    BlockEvents,
    Json,
    content_of,
    named_event,
    text_block,
)
from trunkline_router.edge.anthropic.anthropic_requests import FIELD_NAMES, CountRequest, MessageRequest
from trunkline_router.edge.http.sse import event
from trunkline_router.edge.http_call import CollectedAnswer, HttpCall, answer_of
from trunkline_router.edge.request_fields import refusals_named
from trunkline_router.record.error_statuses import ANTHROPIC_PATH, body_for


async def messages(call: HttpCall) -> None:
    """POST /v1/messages."""
    request = await call.body(MessageRequest)
    generate = await call.converted(request, request.generate_request(call.request_id))
    answer = MessageAnswer(call, request.max_tokens, shows_thinking=request.shows_thinking)
    await call.answer(answer_of(call, generate, request.field_names), answer, streams=request.stream)


async def count_tokens(call: HttpCall) -> None:
    """POST /v1/messages/count_tokens: the tokens of the prompt that the same fields of /v1/messages make."""
    request = await call.body(CountRequest)
    tokenize = await call.converted(request, request.tokenize_request())
    with refusals_named(FIELD_NAMES):
        ids = await call.edge.inference.tokenize(tokenize, call.caller, None)
    await call.respond(orjson.dumps({"input_tokens": len(ids)}))


class MessageAnswer:
    """An answer as a whole or as events.

    max_tokens: what the client asked for
    shows_thinking: whether blocks of thinking have its text
    """

    def __init__(self, call: HttpCall, max_tokens: int, *, shows_thinking: bool) -> None:
        self._request_id = call.request_id
        self._max_tokens = max_tokens
        self._answer = CollectedAnswer()
        self._shows_thinking = shows_thinking
        self._blocks = BlockEvents(shows_thinking=shows_thinking)

    def take(self, response: GenerateResponse) -> None:
        self._answer.take(response)

    async def whole(self) -> bytes:
        """Returns the message. An empty answer has an empty block, because clients read the first one."""
        [output] = self._answer.choices
        content = content_of(self._answer.items(), shows_thinking=self._shows_thinking) or [text_block(output.text)]
        return orjson.dumps(self._message(content, output))

    def events(self, response: GenerateResponse) -> bytes:
        """Returns the events for the next response; empty if it has no text."""
        opening = b""
        if response.HasField("prompt"):
            self._answer.prompt = response.prompt
            message = self._message([], OutputChunk())  # before its output is counted
            opening = named_event("message_start", message=message)
            if not response.prompt.answer_format:
                opening += self._blocks.begin_text()
        self._answer.take(response)
        text = "".join([chunk.text for chunk in response.chunks])
        news = self._blocks.text(text) if text else b"".join(map(self._blocks.part, response.parts))
        return opening + news

    def end(self) -> bytes:
        """Returns the last events."""
        [output] = self._answer.choices
        return b"".join(
            (
                self._blocks.end(),
                named_event("message_delta", delta=self._ending(output), usage=self._usage(output)),
                named_event("message_stop"),
            )
        )

    def failed(self, refused: RequestRefused) -> bytes:
        """Returns the event for an error. Nothing follows it: the answer is not whole."""
        return event(body_for(ANTHROPIC_PATH, refused, self._request_id), b"error")

    def _message(self, content: list[Json], output: OutputChunk) -> Json:
        return {
            "id": f"msg_{self._request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._answer.prompt.model,
            "content": content,
            **self._ending(output),
            "usage": {
                **self._usage(output),
                "cache_creation": None,
                "inference_geo": None,
                "service_tier": "standard",
            },
        }

    def _ending(self, output: OutputChunk) -> Json:
        """Returns why the answer ended; its values are null until it has."""
        return {
            "stop_reason": self._stop_reason(output),
            "stop_sequence": output.stop_string if output.HasField("stop_string") else None,
            "stop_details": None,
            "container": None,
        }

    def _stop_reason(self, output: OutputChunk) -> str | None:
        if not output.finish_reason:
            return None
        if output.HasField("stop_string"):
            return "stop_sequence"
        if output.finish_reason == FinishReason.FINISH_REASON_STOP and calls_tools(self._answer.items()):
            return "tool_use"
        if output.finish_reason != FinishReason.FINISH_REASON_LENGTH:
            return "end_turn"
        return "max_tokens" if len(output.token_ids) >= self._max_tokens else "model_context_window_exceeded"

    def _usage(self, output: OutputChunk) -> Json:
        """Returns the token counts. As Anthropic counts, the tokens that came from the cache are not input tokens."""
        prompt, usage = self._answer.prompt, self._answer.usage
        knows_parts = usage.HasField("reasoning_tokens")
        return {
            "input_tokens": prompt.prompt_tokens - prompt.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": prompt.cached_tokens,
            "output_tokens": len(output.token_ids),
            "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens} if knows_parts else None,
            "server_tool_use": None,
        }
