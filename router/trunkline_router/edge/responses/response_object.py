"""The response object, from its first event to its end."""

import secrets
from collections.abc import Sequence

from trunkline.status import INVALID_REQUEST, QUARANTINED, RequestRefused
from trunkline.v1.generation_pb2 import FinishReason, SamplingParams, TokenLogprobs
from trunkline.v1.inference_pb2 import Usage
from trunkline_router.edge.openai.openai_answers import CollectedAnswer
from trunkline_router.edge.openai.token_details import Json, chat_logprobs
from trunkline_router.edge.responses.response_request import ResponseRequest
from trunkline_router.prompts.token_bytes import TokenBytes
from trunkline_router.record.error_statuses import MAX_MESSAGE_CHARACTERS, status_of
from trunkline_router.request.request_call import PreparedRequest

ID_BYTES = 24  # random ones: ids cannot be guessed


class ResponseObject:
    """What is told of one response."""

    def __init__(self, request: ResponseRequest, *, created: int, is_stored: bool, sees_cache: bool) -> None:
        self.id = "resp_" + secrets.token_hex(ID_BYTES)
        self.item_id = "msg_" + secrets.token_hex(ID_BYTES)
        self.has_logprobs = request.has_logprobs  # of the output's tokens
        self._request = request
        self._names: TokenBytes | None = None
        self._sees_cache = sees_cache
        self._num_top = request.top_logprobs or 0
        self._fields: Json = {
            "id": self.id,
            "object": "response",
            "created_at": created,
            "completed_at": None,
            "status": "in_progress",
            "incomplete_details": None,
            "error": None,
            "model": request.model,
            "instructions": request.instructions,
            "previous_response_id": request.previous_response_id,
            "output": [],
            "usage": None,
            **_sampling_fields(request, SamplingParams()),
            "max_output_tokens": request.max_output_tokens,
            "text": {"format": {"type": "text"}},
            "reasoning": {"effort": None, "summary": None},
            "tools": [],
            "tool_choice": request.tool_choice or "auto",
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "max_tool_calls": None,
            "truncation": "disabled",
            "store": is_stored,
            "background": False,
            "service_tier": "default",
            "metadata": request.metadata or {},
            "safety_identifier": request.safety_identifier,
            "prompt_cache_key": request.prompt_cache_key,
            "user": request.user,
        }

    def admitted(self, prepared: PreparedRequest, names: TokenBytes | None) -> None:
        """Takes what is known once the request is admitted: the model, and the parameters of sampling with the model's
        defaults.  names: needed for log-probabilities"""
        self._names = names
        self._fields |= {"model": prepared.model, **_sampling_fields(self._request, prepared.sampling)}

    def begun(self) -> Json:
        """The response before its output."""
        return self._fields

    def ended(self, item: Json, usage: Usage, completed: int, *, is_stored: bool) -> Json:
        """The whole response.  item: its message;  completed: now, in seconds since 1970"""
        is_cut = item["status"] == "incomplete"
        return {
            **self._fields,
            "status": "incomplete" if is_cut else "completed",
            "completed_at": None if is_cut else completed,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [item],
            "usage": self._usage(usage),
            "store": is_stored,
        }

    def failed(self, answer: CollectedAnswer, refused: RequestRefused) -> Json:
        """The response that an error ended, with the output so far. It is not stored."""
        return {
            **self._fields,
            "status": "failed",
            "error": {"code": _error_code(refused), "message": _message(refused)},
            "output": [self.item(answer)] if answer.choices[0].token_ids else [],
            "store": False,
        }

    def item(self, answer: CollectedAnswer) -> Json:
        """The message that the answer is."""
        choice = answer.choices[0]
        is_complete = choice.last.finish_reason == FinishReason.FINISH_REASON_STOP
        part = {
            "type": "output_text",
            "text": choice.text,
            "annotations": [],
            "logprobs": self.logprobs(choice.logprobs),
        }
        return {
            "id": self.item_id,
            "type": "message",
            "status": "completed" if is_complete else "incomplete",
            "role": "assistant",
            "content": [part],
        }

    def logprobs(self, entries: Sequence[TokenLogprobs]) -> list[Json]:
        """The log-probabilities of tokens; empty if the request does not want them."""
        if self._names is None:
            return []
        content: list[Json] = chat_logprobs(self._names, entries, self._num_top)["content"]
        return content

    def _usage(self, usage: Usage) -> Json:
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cached_tokens if self._sees_cache else 0,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def _sampling_fields(request: ResponseRequest, sampling: SamplingParams) -> Json:
    """The numbers that count: the client's as it gave them, else the model's, else those of the contract."""

    def number(given: float | None, name: str, default: float) -> float:
        if given is not None:
            return given
        # seven digits: the fields have 32 bits, in which 0.7 is 0.699999988
        return float(f"{getattr(sampling, name):.7g}") if sampling.HasField(name) else default  # type: ignore[arg-type]

    return {
        "temperature": number(request.temperature, "temperature", 1.0),
        "top_p": number(request.top_p, "top_p", 1.0),
        "presence_penalty": number(request.presence_penalty, "presence_penalty", 0.0),
        "frequency_penalty": number(request.frequency_penalty, "frequency_penalty", 0.0),
        "top_logprobs": request.top_logprobs or 0,
    }


def _error_code(refused: RequestRefused) -> str:
    """OpenAI's code of an error that ended a response."""
    if refused.reason in (INVALID_REQUEST, QUARANTINED):
        return "invalid_prompt"
    return "rate_limit_exceeded" if status_of(refused) == 429 else "server_error"


def _message(refused: RequestRefused) -> str:
    """The message, shortened and in UTF-8: it may quote what the client sent."""
    return refused.message[:MAX_MESSAGE_CHARACTERS].encode("utf-8", "replace").decode()
