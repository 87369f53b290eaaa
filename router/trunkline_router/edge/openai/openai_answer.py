"""What the answers of chat completions and of completions have in common."""

from typing import Any, ClassVar

import orjson

from trunkline.status import RequestRefused
from trunkline.v1.generation_pb2 import FinishReason, OutputChunk
from trunkline.v1.inference_pb2 import GenerateResponse, Usage
from trunkline_router.edge.http.sse import DONE, event
from trunkline_router.edge.http_call import HttpCall
from trunkline_router.edge.openai.generation_fields import GenerationFields
from trunkline_router.record.error_statuses import openai_body

Json = dict[str, Any]

FINISH_REASONS = {
    FinishReason.FINISH_REASON_STOP: "stop",
    FinishReason.FINISH_REASON_LENGTH: "length",
}


class OpenAiAnswer:
    """An answer as a whole or as events.

    Most events are a choice between a head and a tail that are made once: serializing all of it takes longer.
    """

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    event_object: ClassVar[str]

    def __init__(self, call: HttpCall, request: GenerationFields) -> None:
        self._tells_ids = bool(request.return_token_ids)
        self._has_usage, self._has_continuous_usage = request.includes_usage, request.has_continuous_usage
        self._sees_cache = call.caller.identity.sees_cache  # the caller is told how many tokens came from the cache
        self._usage = Usage()  # of a stream so far
        self._fields: Json = {
            "id": f"{self.id_prefix}-{call.request_id}",
            "object": self.event_object if request.stream else self.whole_object,
            "created": call.created,
            "model": "",
        }
        self._head = self._tail = b""

    def end(self) -> bytes:
        """Returns the last events."""
        if not self._has_usage:
            return DONE
        return event(orjson.dumps({**self._fields, "choices": [], "usage": self._usage_json(self._usage)})) + DONE

    def failed(self, refused: RequestRefused) -> bytes:
        """Returns the event for an error. Without [DONE]: the answer is not whole."""
        return event(openai_body(refused))

    def _count(self, response: GenerateResponse) -> None:
        """Counts the next response of a stream."""
        usage = self._usage
        usage.prompt_tokens += response.prompt.prompt_tokens
        usage.cached_tokens += response.prompt.cached_tokens
        usage.completion_tokens += sum(len(chunk.token_ids) for chunk in response.chunks)
        if response.usage.HasField("reasoning_tokens"):  # on the last one
            usage.reasoning_tokens = response.usage.reasoning_tokens

    def _whole(self, model: str, choices: list[Json], usage: Usage, **beside: Any) -> bytes:
        made = {**self._fields, "model": model, "choices": choices, "usage": self._usage_json(usage), **beside}
        return orjson.dumps(made)

    def _begin(self, model: str) -> None:
        """Call before the first event."""
        self._fields["model"] = model
        self._head = b"data: " + orjson.dumps({**self._fields, "choices": []}).removesuffix(b"]}")
        self._tail = b'],"usage":null}\n\n' if self._has_usage else b"]}\n\n"

    def _event(self, choice: Json, beside: Json | None = None) -> bytes:
        """Returns an event.  beside: what it has beside its choice"""
        if not (beside or self._has_continuous_usage):
            return b"".join((self._head, orjson.dumps(choice), self._tail))
        made = {**self._fields, "choices": [choice], **(beside or {})}
        if self._has_usage:
            made["usage"] = self._usage_json(self._usage) if self._has_continuous_usage else None
        return event(orjson.dumps(made))

    def _ending(self, output: OutputChunk) -> Json:
        """Returns what a choice has at its end, and the tokens of this part of it, if they are asked for."""
        ending: Json = {}
        if output.finish_reason:
            ending["finish_reason"] = FINISH_REASONS.get(output.finish_reason, "stop")
            ending["stop_reason"] = _stop_reason(output)
        if self._tells_ids:
            ending["token_ids"] = list(output.token_ids)
        return ending

    def _usage_json(self, usage: Usage) -> Json:
        made: Json = {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        if self._sees_cache:
            made["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
        if usage.HasField("reasoning_tokens"):
            made["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
        return made


def _stop_reason(output: OutputChunk) -> int | str | None:
    """Returns vLLM's stop_reason: the stop string or the stop token that ended the choice."""
    kind = output.WhichOneof("matched")
    return None if kind is None else output.stop_string if kind == "stop_string" else output.stop_token_id
