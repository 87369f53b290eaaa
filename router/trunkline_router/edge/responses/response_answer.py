"""The answer of POST /v1/responses: the response object, from its first event to its end."""

import secrets
from collections.abc import Sequence
from typing import Any

import orjson

from trunkline.sampling_params import NEUTRAL
from trunkline.status import INVALID_REQUEST, QUARANTINED, RequestRefused
from trunkline.v1.generation_pb2 import FinishReason, SamplingParams, TokenLogprobs
from trunkline.v1.inference_pb2 import ChatMessage, GenerateResponse, Usage
from trunkline_router.edge.http.sse import event
from trunkline_router.edge.http_call import CollectedAnswer, HttpCall
from trunkline_router.edge.openai.openai_answer import Json
from trunkline_router.edge.openai.token_details import chat_logprobs, tokenizer_of
from trunkline_router.edge.responses.response_request import ResponseRequest
from trunkline_router.edge.responses.response_store import ResponseStore, StoredResponse
from trunkline_router.prompts.token_bytes import TokenBytes
from trunkline_router.record.error_statuses import MAX_MESSAGE_CHARACTERS, status_of
from trunkline_router.request.request_call import PreparedRequest

ID_BYTES = 24  # random ones: ids cannot be guessed
DELTA = "response.output_text.delta"
_NUMBERS = ("temperature", "top_p", "presence_penalty", "frequency_penalty")  # that a response repeats


class ResponseAnswer:
    """One response, as a whole or as events in OpenAI's order, each with its number.

    The events of tokens have a head that is made once: serializing all of it takes longer.

    conversation: what it answers, without instructions
    store: where it is stored once it is whole; None: it is not
    """

    def __init__(
        self,
        call: HttpCall,
        request: ResponseRequest,
        conversation: tuple[ChatMessage, ...],
        store: ResponseStore | None,
    ) -> None:
        self._call = call
        self._request = request
        self._conversation = conversation
        self._store = store
        self._id, self._item_id = (f"{kind}_{secrets.token_hex(ID_BYTES)}" for kind in ("resp", "msg"))
        self._tokens: TokenBytes | None = None
        self._answer = CollectedAnswer()
        self._number = 0  # of the next event
        self._has_begun = False
        self._place: Json = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        head = orjson.dumps({"type": DELTA, **self._place}).removesuffix(b"}")
        self._delta_head = b"event: %b\ndata: %b," % (DELTA.encode(), head)
        self._fields: Json = {
            "id": self._id,
            "object": "response",
            "created_at": call.created,
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
            "store": store is not None,
            "background": False,
            "service_tier": "default",
            "metadata": request.metadata or {},
            "safety_identifier": request.safety_identifier,
            "prompt_cache_key": request.prompt_cache_key,
            "user": request.user,
        }

    async def admitted(self, prepared: PreparedRequest) -> None:
        """Takes what is known once the request is admitted: the model, the parameters of sampling with the model's
        defaults, and the names of tokens if their log-probabilities are wanted. Raises RequestRefused."""
        self._fields |= {"model": prepared.model, **_sampling_fields(self._request, prepared.sampling)}
        if self._request.num_top is not None:
            self._tokens = await (await tokenizer_of(self._call, prepared)).token_bytes()

    def take(self, response: GenerateResponse) -> None:
        self._answer.take(response)

    async def whole(self) -> bytes:
        """Returns the whole response as JSON, and stores it if it is to be stored and fits."""
        return self._whole(self._item())

    def events(self, response: GenerateResponse) -> bytes:
        """Returns the events for the next response of the shared path; empty if it has nothing to tell."""
        self._answer.take(response)
        events = b"" if self._has_begun else self._opening()
        for chunk in response.chunks:
            text, logprobs = chunk.text, self._logprobs(chunk.logprobs)
            if text or logprobs:
                data = orjson.dumps({"sequence_number": self._number, "delta": text, "logprobs": logprobs})
                events += b"%b%b\n\n" % (self._delta_head, data.removeprefix(b"{"))
                self._number += 1
        return events

    def end(self) -> bytes:
        """Returns the last events. Clients take no [DONE] here."""
        item = self._item()
        part = item["content"][0]
        body = orjson.Fragment(self._whole(item))
        last = "response.completed" if item["status"] == "completed" else "response.incomplete"
        return b"".join(
            (
                b"" if self._has_begun else self._opening(),
                self._event("response.output_text.done", **self._place, text=part["text"], logprobs=part["logprobs"]),
                self._event("response.content_part.done", **self._place, part=part),
                self._event("response.output_item.done", output_index=0, item=item),
                self._event(last, response=body),
            )
        )

    def failed(self, refused: RequestRefused) -> bytes:
        """Returns the event for an error, with the output so far. The response is not stored."""
        opening = b"" if self._has_begun else self._lifecycle()  # only a comment has been sent
        response = {
            **self._fields,
            "status": "failed",
            "error": {"code": _error_code(refused), "message": _message(refused)},
            "output": [self._item()] if self._answer.choices[0].token_ids else [],
            "store": False,
        }
        return opening + self._event("response.failed", response=response)

    def _lifecycle(self) -> bytes:
        names = ("response.created", "response.in_progress")
        return b"".join([self._event(name, response=self._fields) for name in names])

    def _opening(self) -> bytes:
        self._has_begun = True
        return b"".join(
            (
                self._lifecycle(),
                self._event("response.output_item.added", output_index=0, item=self._message("in_progress", [])),
                self._event("response.content_part.added", **self._place, part=_part("", [])),
            )
        )

    def _event(self, name: str, **fields: Any) -> bytes:
        data = orjson.dumps({"type": name, "sequence_number": self._number, **fields})
        self._number += 1
        return event(data, name.encode())

    def _whole(self, item: Json) -> bytes:
        is_cut = item["status"] == "incomplete"
        response = {
            **self._fields,
            "status": item["status"],
            "completed_at": None if is_cut else self._call.created,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [item],
            "usage": self._usage(self._answer.usage),
        }
        if self._store is not None:
            body = orjson.dumps(response)
            message = ChatMessage(role="assistant", content=item["content"][0]["text"])
            stored = StoredResponse(body, (*self._conversation, message))
            if self._store.put(self._call.caller.tenant, self._id, stored):
                return body
        return orjson.dumps({**response, "store": False})

    def _item(self) -> Json:
        """The message that the answer is."""
        [choice] = self._answer.choices
        is_complete = choice.finish_reason == FinishReason.FINISH_REASON_STOP
        part = _part(choice.text, self._logprobs(choice.logprobs))
        return self._message("completed" if is_complete else "incomplete", [part])

    def _message(self, status: str, content: list[Json]) -> Json:
        return {"id": self._item_id, "type": "message", "status": status, "role": "assistant", "content": content}

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> list[Json]:
        """The log-probabilities of tokens; empty if the request does not want them."""
        if self._tokens is None:
            return []
        content: list[Json] = chat_logprobs(self._tokens, entries, self._request.num_top or 0)["content"]
        return content

    def _usage(self, usage: Usage) -> Json:
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def _part(text: str, logprobs: list[Json]) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _sampling_fields(request: ResponseRequest, sampling: SamplingParams) -> Json:
    """The numbers that count: the client's as it gave them, else the model's, else those of the contract."""

    def number(name: Any) -> float:
        given: float | None = getattr(request, name)
        if given is None and sampling.HasField(name):
            return float(f"{getattr(sampling, name):.7g}")  # the fields have 32 bits, in which 0.7 is 0.699999988
        return getattr(NEUTRAL, name) if given is None else given

    return {**{name: number(name) for name in _NUMBERS}, "top_logprobs": request.top_logprobs or 0}


def _error_code(refused: RequestRefused) -> str:
    """OpenAI's code of an error that ended a response."""
    if refused.reason in (INVALID_REQUEST, QUARANTINED):
        return "invalid_prompt"
    return "rate_limit_exceeded" if status_of(refused) == 429 else "server_error"


def _message(refused: RequestRefused) -> str:
    """The message, shortened and in UTF-8: it may quote what the client sent."""
    return refused.message[:MAX_MESSAGE_CHARACTERS].encode("utf-8", "replace").decode()
