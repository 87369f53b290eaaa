"""POST /v1/responses, and GET and DELETE /v1/responses/{id}."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from urllib.parse import parse_qsl

import orjson

from trunkline.status import CODE_INVALID_ARGUMENT, CODE_NOT_FOUND, RequestRefused, invalid
from trunkline.v1.inference_pb2 import ChatMessage, GenerateRequest
from trunkline_router.edge.chat_messages import chat_message
from trunkline_router.edge.http_call import Handler, HttpCall, answer_of
from trunkline_router.edge.request_fields import STEP_ITEMS, Steps
from trunkline_router.edge.responses.input_items import INPUT_ITEM, InputItem, InputTurn, ReferenceItem
from trunkline_router.edge.responses.response_answer import ResponseAnswer
from trunkline_router.edge.responses.response_items import response_of
from trunkline_router.edge.responses.response_request import ResponseRequest
from trunkline_router.edge.responses.response_store import ResponseStore, StoredResponse
from trunkline_router.prompts.tokenizer import MAX_CHAT_BYTES
from trunkline_router.record.error_statuses import PREVIOUS_RESPONSE_NOT_FOUND, RESPONSE_NOT_FOUND
from trunkline_router.request.request_call import Extras

NONE_BEFORE = StoredResponse(b"", ())
NO_STORE = "this server stores no responses"


class Responses:
    """The endpoints.  store: None if the server stores no responses"""

    def __init__(self, store: ResponseStore | None) -> None:
        self._store = store

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The handlers, by method and path."""
        return {
            "POST /v1/responses": self.create,
            "GET /v1/responses/{response}": self.retrieve,
            "DELETE /v1/responses/{response}": self.delete,
        }

    async def create(self, call: HttpCall) -> None:
        """POST /v1/responses. A response is stored once it is whole: not if it fails or its client goes before."""
        request = await self._with_items(call, await call.body(ResponseRequest))
        if request.store and self._store is None:
            raise invalid("store", f"must not be true: {NO_STORE}")
        earlier = self._earlier(call, request)
        turns, conversation, generate = await call.converted(request, _conversion(request, earlier, call.request_id))
        answer = ResponseAnswer(call, request, conversation, None if request.store is False else self._store)
        names = request.field_names(len(earlier.conversation), turns)
        responses = answer_of(call, generate, names, Extras(on_admission=answer.admitted))
        await call.answer(responses, answer, streams=request.stream)

    async def retrieve(self, call: HttpCall) -> None:
        """GET /v1/responses/{id}."""
        check_query(call)
        name = call.scope["path_params"]["response"]
        stored = self._find(call, name)
        if stored is None:
            raise self._not_found(name)
        await call.respond(stored.body if call.caller.identity.sees_cache else without_cache(stored.body))

    async def delete(self, call: HttpCall) -> None:
        """DELETE /v1/responses/{id}. Later responses that continue it keep their conversations."""
        name = call.scope["path_params"]["response"]
        if self._store is None or not self._store.delete(call.caller.tenant, name):
            raise self._not_found(name)
        await call.respond(orjson.dumps({"id": name, "object": "response", "deleted": True}))

    def _earlier(self, call: HttpCall, request: ResponseRequest) -> StoredResponse:
        """The response that the request continues. Raises RequestRefused."""
        name = request.previous_response_id
        if name is None:
            return NONE_BEFORE
        stored = self._find(call, name)
        if stored is None:
            reason, why = PREVIOUS_RESPONSE_NOT_FOUND, f"previous_response_id: {self._no_such(name)}"
            raise RequestRefused(CODE_INVALID_ARGUMENT, reason, why, field="previous_response_id")
        return stored

    async def _with_items(self, call: HttpCall, request: ResponseRequest) -> ResponseRequest:
        """Returns the request with the items of stored responses in the place of references to them. Raises
        RequestRefused (INVALID_REQUEST) if they are longer together than a conversation may be: a short body can refer
        to a long item thousands of times."""
        items = request.input if isinstance(request.input, list) else []
        times = Counter(item.id for item in items if isinstance(item, ReferenceItem))
        found: dict[str, InputItem] = {}
        num_bytes = 0
        for name in {response_of(item_id) for item_id in times}:
            if (stored := self._find(call, name)) is not None:
                for output in orjson.loads(stored.body)["output"]:
                    if number := times[output["id"]]:
                        found[output["id"]] = item = INPUT_ITEM.validate_python(output)
                        num_bytes += number * chat_message(*item.turn("input")).ByteSize()
                if num_bytes > MAX_CHAT_BYTES:
                    raise invalid("input", f"refers to more than {MAX_CHAT_BYTES} bytes of stored items")
                await asyncio.sleep(0)  # there may be thousands, and long ones
        if not found:
            return request
        resolved = [found.get(item.id, item) if isinstance(item, ReferenceItem) else item for item in items]
        return request.model_copy(update={"input": resolved})

    def _find(self, call: HttpCall, name: str) -> StoredResponse | None:
        return None if self._store is None else self._store.get(call.caller.tenant, name)

    def _not_found(self, name: str) -> RequestRefused:
        return RequestRefused(CODE_NOT_FOUND, RESPONSE_NOT_FOUND, self._no_such(name))

    def _no_such(self, name: str) -> str:
        return f"there is no response {name[:128]!r}" + (f" ({NO_STORE})" if self._store is None else "")


def _conversion(
    request: ResponseRequest, earlier: StoredResponse, request_id: str
) -> Steps[tuple[Sequence[InputTurn], tuple[ChatMessage, ...], GenerateRequest]]:
    """Returns the turns of the input, the conversation that they continue with them, and the request for it. Raises
    RequestRefused (INVALID_REQUEST)."""
    turns = yield from request.turns(earlier.cut_off)
    conversation = list(earlier.conversation)
    for index, turn in enumerate(turns):
        conversation.append(turn.message())
        if index % STEP_ITEMS == STEP_ITEMS - 1:
            yield
    return turns, tuple(conversation), request.generate_request(request_id, conversation)


def without_cache(body: bytes) -> bytes:
    """Returns a stored response as a caller that may not see cached tokens would have got it."""
    response = orjson.loads(body)
    if response["usage"] is not None:
        response["usage"]["input_tokens_details"]["cached_tokens"] = 0
    return orjson.dumps(response)


def check_query(call: HttpCall) -> None:
    """Raises RequestRefused (INVALID_REQUEST) for what a retrieved response cannot be asked for."""
    query = call.scope["query_string"].decode("latin-1")
    unknown = []
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name == "stream" and value.lower() in ("false", "0"):
            continue
        if name in ("stream", "starting_after"):
            raise invalid(name, "is not supported: a stored response is returned whole")
        if name not in ("stream", "include", "include[]", "include_obfuscation"):
            unknown.append(name[:64])
    call.check_unknown(unknown)
