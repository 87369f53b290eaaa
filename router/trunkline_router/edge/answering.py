"""The answer of the path that all protocols share, with refusals in the words of HTTP clients."""

from collections.abc import AsyncGenerator, Mapping

from trunkline.status import RequestRefused, no_worker
from trunkline.v1.generation_pb2 import FINISH_REASON_ABORT
from trunkline.v1.inference_pb2 import GenerateRequest, GenerateResponse
from trunkline_router.edge.http_call import HttpCall

SAMPLING = "sampling."
# Fields of the shared path that HTTP clients know by other names.
NAMES = {
    "text": "prompt",
    "token_ids": "prompt",
    "chat": "messages",
    "chat.messages": "messages",
    "template_variables": "chat_template_kwargs",
}


async def answer_of(call: HttpCall, generate: GenerateRequest) -> AsyncGenerator[GenerateResponse, None]:
    """Yields the responses to one request of a call. Raises RequestRefused, with fields as HTTP clients name them."""
    responses = call.edge.inference.generate(call.request_call(generate))
    try:
        async for response in responses:
            if any(chunk.finish_reason == FINISH_REASON_ABORT for chunk in response.chunks):
                raise no_worker("the answer was cancelled at its worker")  # cut text must not look whole
            if call.prompt is None and response.HasField("prompt"):
                call.prompt = response.prompt
            yield response
    except RequestRefused as refused:
        raise renamed(refused) from None
    finally:
        await responses.aclose()


def renamed(refused: RequestRefused, names: Mapping[str, str] = NAMES) -> RequestRefused:
    """Returns the refusal with its field as HTTP clients name it."""
    name = names.get(refused.field, refused.field.removeprefix(SAMPLING))
    message = refused.message
    if refused.field and message.startswith(f"{refused.field}: "):
        message = f"{name}: {message.removeprefix(f'{refused.field}: ')}"
    refused.field, refused.message = name, message
    return refused
