"""A worker serves routers that put more into one message of their session than today's routers do."""

from collections.abc import Iterator

import grpc
import pytest

from tests.worker.front.served_front import MODEL, served_front
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.worker_pb2 import GetModelResponse, SessionRequest, SessionResponse, Submit
from trunkline_runtime.channel import open_channel
from trunkline_worker.front.door import most_message_bytes
from trunkline_worker.front.service import SERVICE

MESSAGE_BYTES = 16 << 20  # of submits, of a router of protocol 2
LONG_MODEL = GetModelResponse()
LONG_MODEL.CopyFrom(MODEL)
LONG_MODEL.context_length, LONG_MODEL.kv_token_capacity, LONG_MODEL.max_waiting_tokens = 131072, 400_000, 1 << 24
LONG_MODEL.vocab_size = 150_000


def choices(count: int, prompt_tokens: int) -> list[Submit]:
    # Three bytes each. The last one has text, "!": without any, each choice would look for text in all of its prompt.
    prompt = [*[100_000] * (prompt_tokens - 1), 6]
    sampling = SamplingParams(max_tokens=5, seed=1)
    return [
        Submit(handle=index + 1, choice=index, prompt_token_ids=prompt, sampling=sampling) for index in range(count)
    ]


def split_as_then(submits: list[Submit], aborts: list[int]) -> Iterator[SessionRequest]:
    part, size = SessionRequest(), 0
    for submit in submits:
        if part.submits and size + submit.ByteSize() > MESSAGE_BYTES:
            yield part
            part, size = SessionRequest(), 0
        part.submits.append(submit)
        size += submit.ByteSize()
    part.abort_handles.extend(aborts)
    yield part


@pytest.mark.parametrize("count", [12, 50])
async def test_many_choices_of_a_long_prompt_in_one_message_are_all_answered(count: int) -> None:
    async with served_front(model=LONG_MODEL) as worker, open_channel(worker.address) as channel:
        method: grpc.aio.StreamStreamMultiCallable[bytes, SessionResponse] = channel.stream_stream(
            f"/{SERVICE}/Session", response_deserializer=SessionResponse.FromString
        )
        call = method()
        aborts = list(range(1 << 20, (1 << 20) + 10_000))  # of choices that have ended
        for message in split_as_then(choices(count, 120_000), aborts):
            await call.write(message.SerializeToString())
        answered: dict[int, list[int]] = {}
        while len(answered) < count:
            response = await call.read()
            assert isinstance(response, SessionResponse), await call.details()
            for output in response.outputs:
                answered[output.handle] = list(output.chunk.token_ids)
        assert answered == {handle: [5] for handle in range(1, count + 1)}
        call.cancel()


def test_the_fullest_message_of_such_a_router_fits_whatever_model_the_worker_has() -> None:
    """Its submits have up to 16 MiB together, each with its tag and length; aborts of all that is open come with it."""
    submits = choices(8, 650_000)  # of other models: only their sizes count
    (message,) = split_as_then(submits, list(range(1 << 30, (1 << 30) + 100_000)))
    assert message.ByteSize() > 15 << 20
    for model in (GetModelResponse(), MODEL, LONG_MODEL):
        assert message.ByteSize() <= most_message_bytes(model)
