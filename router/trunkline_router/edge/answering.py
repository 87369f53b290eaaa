"""The answer of the path that all protocols share, with refusals in the words of HTTP clients."""

from collections.abc import AsyncGenerator

from trunkline.status import RequestRefused, no_worker
from trunkline.v1.generation_pb2 import FINISH_REASON_ABORT
from trunkline.v1.inference_pb2 import GenerateRequest, GenerateResponse
from trunkline_router.edge.http_call import HttpCall
from trunkline_router.edge.request_fields import FieldNames, renamed
from trunkline_router.request.request_call import NO_EXTRAS, Extras


async def answer_of(
    call: HttpCall, generate: GenerateRequest, names: FieldNames, extras: Extras = NO_EXTRAS
) -> AsyncGenerator[GenerateResponse, None]:
    """Yields the responses to one request of a call. Raises RequestRefused, with its field as `names` has it."""
    responses = call.edge.inference.generate(call.request_call(generate, extras))
    try:
        async for response in responses:
            if any(chunk.finish_reason == FINISH_REASON_ABORT for chunk in response.chunks):
                raise no_worker("the answer was cancelled at its worker")  # cut text must not look whole
            if call.prompt is None and response.HasField("prompt"):
                call.prompt = response.prompt
            yield response
    except RequestRefused as refused:
        raise renamed(refused, names) from None
    finally:
        await responses.aclose()
