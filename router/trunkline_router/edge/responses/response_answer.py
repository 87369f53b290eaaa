"""The answer of POST /v1/responses: the response object, from its first event to its end."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import orjson

from trunkline.sampling_params import NEUTRAL
from trunkline.status import INVALID_REQUEST, QUARANTINED, RequestRefused
from trunkline.v1.generation_pb2 import SamplingParams, TokenLogprobs
from trunkline.v1.inference_pb2 import ChatMessage, GenerateResponse, Usage
from trunkline_router.edge.http.sse import event
from trunkline_router.edge.http_call import HttpCall
from trunkline_router.edge.openai.openai_answer import Json
from trunkline_router.edge.openai.token_details import chat_logprobs, tokenizer_of
from trunkline_router.edge.responses.input_items import INCOMPLETE
from trunkline_router.edge.responses.response_items import (
    COMPLETED,
    IN_PROGRESS,
    News,
    Output,
    OutputItem,
    new_response_id,
)
from trunkline_router.edge.responses.response_request import Reasoning, ResponseRequest
from trunkline_router.edge.responses.response_store import ResponseStore, StoredResponse
from trunkline_router.edge.tool_fields import is_server_tool
from trunkline_router.prompts.token_bytes import TokenBytes
from trunkline_router.record.error_statuses import MAX_MESSAGE_CHARACTERS, status_of
from trunkline_router.request.request_call import PreparedRequest

_NUMBERS = ("temperature", "top_p", "presence_penalty", "frequency_penalty")  # that a response repeats


class ResponseAnswer:
    """One response, as a whole or as events in OpenAI's order, each with its number.

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
        self._id = new_response_id()
        self._tokens: TokenBytes | None = None
        self._output = Output(self._id, self._logprobs, request.custom_tools)
        self._number = 0  # of the next event
        self._has_begun = False
        self._open: OutputItem | None = None  # the item whose events are being told
        self._fields: Json = {
            "id": self._id,
            "object": "response",
            "created_at": call.created,
            "completed_at": None,
            "status": IN_PROGRESS,
            "incomplete_details": None,
            "error": None,
            "model": request.model,
            "instructions": request.instructions,
            "previous_response_id": request.previous_response_id,
            "output": [],
            "usage": None,
            **_sampling_fields(request, SamplingParams()),
            "max_output_tokens": request.max_output_tokens,
            "text": {"format": request.text_format.repeated()},
            "reasoning": _reasoning_fields(request),
            "tools": [tool.repeated() for tool in request.tools or () if not is_server_tool(tool.type)],
            "tool_choice": request.repeated_choice,
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
        for _ in self._output.take(response):
            pass

    async def whole(self) -> bytes:
        """Returns the whole response as JSON, and stores it if it is to be stored and fits."""
        for _ in self._output.end():
            pass
        return self._whole()

    def events(self, response: GenerateResponse) -> bytes:
        """Returns the events for the next response of the shared path; empty if it has nothing to tell."""
        return b"".join(self._events(self._output.take(response)))

    def end(self) -> bytes:
        """Returns the last events. Clients take no [DONE] here."""
        events = [*self._events(self._output.end()), *self._close()]
        last = "response.completed" if self._output.is_complete else "response.incomplete"
        return b"".join((*events, self._event(last, response=orjson.Fragment(self._whole()))))

    def failed(self, refused: RequestRefused) -> bytes:
        """Returns the event for an error, with the output so far. The response is not stored."""
        response = {
            **self._fields,
            "status": "failed",
            "error": {"code": _error_code(refused), "message": _message(refused)},
            "output": self._output.json(),
            "store": False,
        }
        return b"".join((*self._lifecycle(), self._event("response.failed", response=response)))

    def _lifecycle(self) -> Iterator[bytes]:
        """The first events, unless they have been sent."""
        if not self._has_begun:
            self._has_begun = True
            for name in ("response.created", "response.in_progress"):
                yield self._event(name, response=self._fields)

    def _events(self, news: Iterable[News]) -> Iterator[bytes]:
        """The events for what was added to the output. An item is closed before the next one is opened."""
        yield from self._lifecycle()
        for item, text, logprobs in news:
            if item is not self._open:
                yield from self._close()
                self._open = item
                for name, fields in item.opening():
                    yield self._event(name, **fields)
            if (text or logprobs) and (delta := item.delta(self._number, text, logprobs)):
                yield delta
                self._number += 1
            if item.answer.is_complete:
                yield from self._close()

    def _close(self) -> Iterator[bytes]:
        """The last events of the item that is open."""
        if self._open is not None:
            for name, fields in self._open.closing(self._output.status(self._open)):
                yield self._event(name, **fields)
            self._open = None

    def _event(self, name: str, /, **fields: Any) -> bytes:
        data = orjson.dumps({"type": name, "sequence_number": self._number, **fields})
        self._number += 1
        return event(data, name.encode())

    def _whole(self) -> bytes:
        output = self._output
        response = {
            **self._fields,
            "status": COMPLETED if output.is_complete else INCOMPLETE,
            "completed_at": self._call.created if output.is_complete else None,
            "incomplete_details": None if output.is_complete else {"reason": "max_output_tokens"},
            "output": output.json(),
            "usage": self._usage(output.usage),
        }
        if self._store is not None:
            body = orjson.dumps(response)
            stored = StoredResponse(body, (*self._conversation, *output.turn()), output.cut_off())
            if self._store.put(self._call.caller.tenant, self._id, stored):
                return body
        return orjson.dumps({**response, "store": False})

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
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def _sampling_fields(request: ResponseRequest, sampling: SamplingParams) -> Json:
    """The numbers that count: the client's as it gave them, else the model's, else those of the contract."""

    def number(name: Any) -> float:
        given: float | None = getattr(request, name)
        if given is None and sampling.HasField(name):
            return float(f"{getattr(sampling, name):.7g}")  # the fields have 32 bits, in which 0.7 is 0.699999988
        return getattr(NEUTRAL, name) if given is None else given

    return {**{name: number(name) for name in _NUMBERS}, "top_logprobs": request.top_logprobs or 0}


def _reasoning_fields(request: ResponseRequest) -> Json:
    reasoning = request.reasoning or Reasoning()
    return {"effort": reasoning.effort, "summary": reasoning.summary}


def _error_code(refused: RequestRefused) -> str:
    """OpenAI's code of an error that ended a response."""
    if refused.reason in (INVALID_REQUEST, QUARANTINED):
        return "invalid_prompt"
    return "rate_limit_exceeded" if status_of(refused) == 429 else "server_error"


def _message(refused: RequestRefused) -> str:
    """The message, shortened and in UTF-8: it may quote what the client sent."""
    return refused.message[:MAX_MESSAGE_CHARACTERS].encode("utf-8", "replace").decode()
