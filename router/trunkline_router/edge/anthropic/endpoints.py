"""POST /v1/messages and /v1/messages/count_tokens."""

import orjson

from trunkline.status import RequestRefused
from trunkline_router.edge.answering import answer_of
from trunkline_router.edge.anthropic.conversation import FIELD_NAMES
from trunkline_router.edge.anthropic.message_answer import MessageProgress, MessageStream, WholeMessage
from trunkline_router.edge.anthropic.message_request import CountRequest, MessageRequest
from trunkline_router.edge.field_names import renamed
from trunkline_router.edge.http_call import HttpCall
from trunkline_router.edge.request_fields import validated


async def messages(call: HttpCall) -> None:
    """POST /v1/messages."""
    async with call.json() as body:
        request: MessageRequest = validated(MessageRequest, body)
        generate = request.generate_request(call.request_id)  # first: other content than text has fields of its own
        call.check_unknown(request.unknown())
        request.check()
    progress = MessageProgress(call.request_id, request.max_tokens, sees_cache=call.caller.identity.sees_cache)
    responses = answer_of(call, generate, FIELD_NAMES)
    if request.stream:
        await call.stream(responses, MessageStream(progress))
        return
    answer = WholeMessage(progress)
    await call.collect(responses, answer.take)
    await call.respond(answer.json())


async def count_tokens(call: HttpCall) -> None:
    """POST /v1/messages/count_tokens: the tokens of the prompt that the same fields of /v1/messages make."""
    async with call.json() as body:
        request: CountRequest = validated(CountRequest, body)
        tokenize = request.tokenize_request()
        call.check_unknown(request.unknown())
        request.check()
    try:
        ids = await call.edge.inference.tokenize(tokenize, call.caller, None)
    except RequestRefused as refused:
        raise renamed(refused, FIELD_NAMES) from None
    await call.respond(orjson.dumps({"input_tokens": len(ids)}))
