"""Large answers are made in pieces, between which other tasks run, and sent before they are whole."""

import asyncio
from base64 import b64decode
from collections.abc import AsyncGenerator

import httpx2
import numpy as np
import orjson
import pytest
from numpy.typing import NDArray
from structlog.testing import capture_logs

from tests.router.fake_worker import FakeChoice, FakeWorker
from tests.router.loop_work import watched_loop
from tests.router.openai.openai_rig import client
from trunkline.status import invalid
from trunkline.v1.generation_pb2 import Vector
from trunkline.v1.inference_pb2 import GenerateResponse
from trunkline.v1.worker_pb2 import Capability, PoolingModel, Task
from trunkline_router.edge.pooling.pooled_call import MOST_HELD_BYTES
from trunkline_router.request.inference import Inference
from trunkline_router.request.request_call import RequestCall

PATH = "/v1/embeddings"
MOST_S = 0.05  # the whole answer takes several times as long
DIMENSIONS = 1 << 15  # 175 KB of an answer, in base64
COUNT = 80
NUM_HELD = MOST_HELD_BYTES * 3 // 4 // (4 * DIMENSIONS)  # vectors of an answer that are not sent before it is whole


def vectors_of(count: int, dimensions: int) -> NDArray[np.float32]:
    return np.random.default_rng(0).random((count, dimensions), np.float32)


def embedder(dimensions: int) -> FakeWorker:
    pooling, able = PoolingModel(dimensions=dimensions), [Capability.CAPABILITY_VECTORS]
    return FakeWorker("e", answer=None, task=Task.TASK_EMBED, capabilities=able, pooling=pooling)


def body_of(count: int, **fields: str) -> dict[str, object]:
    return {"model": "tiny", "input": [[5, 6]] * count, **fields}


async def first_answered(worker: FakeWorker, vectors: NDArray[np.float32], count: int) -> list[FakeChoice]:
    """Answers the first inputs of a request, the last of them first. Returns the others."""
    choices = [await worker.arrived.get() for _ in vectors]
    for choice, vector in reversed(list(zip(choices[:count], vectors, strict=False))):
        choice.whole(vector=Vector(values=vector.tobytes()))
    return choices[count:]


async def test_a_large_answer_never_holds_the_loop_for_long() -> None:
    worker, vectors = embedder(1024), vectors_of(1024, 1024)

    async def answer_all() -> None:
        for vector in vectors:
            (await worker.arrived.get()).whole(vector=Vector(values=vector.tobytes()))

    async with client(worker) as asks, watched_loop() as work:
        answering = asyncio.create_task(answer_all())
        async with asks.http.stream("POST", PATH, json=body_of(len(vectors))) as answer:
            pieces = [piece async for piece in answer.aiter_raw()]
        await answering
    assert work.longest_s < MOST_S
    data = orjson.loads(b"".join(pieces))["data"]
    assert np.array_equal(np.array([one["embedding"] for one in data], np.float32), vectors)


async def test_a_large_answer_begins_before_it_is_whole_and_keeps_the_order_of_its_inputs() -> None:
    worker, vectors = embedder(DIMENSIONS), vectors_of(COUNT, DIMENSIONS)
    async with client(worker) as asks:
        first = asyncio.create_task(first_answered(worker, vectors, NUM_HELD + 1))
        async with asks.http.stream("POST", PATH, json=body_of(COUNT, encoding_format="base64")) as answer:
            for choice, vector in zip(await first, vectors[NUM_HELD + 1 :], strict=True):
                choice.whole(vector=Vector(values=vector.tobytes()))
            made = orjson.loads(await answer.aread())
    assert [one["index"] for one in made["data"]] == list(range(COUNT))
    found = [np.frombuffer(b64decode(one["embedding"]), "<f4") for one in made["data"]]
    assert np.array_equal(np.stack(found), vectors)
    assert (made["model"], made["usage"]["prompt_tokens"]) == ("tiny", 2 * COUNT)


async def test_an_error_cuts_off_an_answer_that_has_begun_and_is_not_logged_as_a_bug() -> None:
    worker, vectors = embedder(DIMENSIONS), vectors_of(COUNT, DIMENSIONS)
    with capture_logs() as logs:
        async with client(worker) as asks:
            first = asyncio.create_task(first_answered(worker, vectors, NUM_HELD + 1))
            async with asks.http.stream("POST", PATH, json=body_of(COUNT, encoding_format="base64")) as answer:
                (await first)[0].fail(invalid("prompt", "is wrong"))
                with pytest.raises(httpx2.RemoteProtocolError):
                    await answer.aread()
    assert "error" not in {line["log_level"] for line in logs}


async def test_an_error_before_an_answer_has_begun_has_its_own_status() -> None:
    worker, vectors = embedder(DIMENSIONS), vectors_of(COUNT, DIMENSIONS)
    async with client(worker) as asks:
        first = asyncio.create_task(first_answered(worker, vectors, NUM_HELD // 2))
        refusing = asyncio.create_task(asks.post(PATH, body_of(COUNT, encoding_format="base64")))
        (await first)[0].fail(invalid("prompt", "is wrong"))
        assert (await refusing).status_code == 400


@pytest.mark.parametrize("times", [0, 2])
async def test_an_answer_that_lacks_an_output_or_has_one_twice_is_an_error(
    times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = Inference.generate

    async def wrong(self: Inference, call: RequestCall) -> AsyncGenerator[GenerateResponse, None]:
        async for response in generate(self, call):
            for _ in range(times if response.chunks[0].index == 1 else 1):
                yield response

    monkeypatch.setattr(Inference, "generate", wrong)
    worker, vectors = embedder(2), vectors_of(2, 2)
    async with client(worker) as asks:
        answering = asyncio.create_task(first_answered(worker, vectors, 2))
        error = await asks.refusal(PATH, 500, input=[[5, 6]] * 2)
        await answering
    assert error["code"] == "internal"
