"""What a front makes of outputs that are no tokens, over a session and for direct clients."""

from struct import unpack
from typing import Any

import grpc.aio
import pytest

from tests.worker.front.served_front import MODEL, WHOLE, ServedFront, served_front
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.worker_pb2 import (
    Capability,
    GetModelResponse,
    OutputKind,
    SessionRequest,
    Submit,
    Work,
    WorkerServiceGenerateRequest,
)
from trunkline.v1.worker_pb2_grpc import WorkerServiceStub
from trunkline_runtime.channel import open_channel

ABLE = GetModelResponse()
ABLE.CopyFrom(MODEL)
ABLE.capabilities[:] = [Capability.CAPABILITY_VECTORS, Capability.CAPABILITY_SCORES]
KINDS = {"vector": OutputKind.OUTPUT_KIND_VECTOR, "score": OutputKind.OUTPUT_KIND_SCORE}


def submit(handle: int, kind: str) -> Submit:
    sampling = SamplingParams(seed=1, max_tokens=0)
    return Submit(handle=handle, prompt_token_ids=[5, 6], sampling=sampling, work=Work(output=KINDS[kind]))


def values_of(output: Any) -> list[float]:
    return list(unpack("<2f", output.vector.values) if output.HasField("vector") else output.score.values)


async def test_a_session_gets_each_in_one_output_that_ends_its_choice() -> None:
    async with served_front(model=ABLE) as worker, open_channel(worker.address) as channel:
        session: Any = WorkerServiceStub(channel).Session()
        await session.read()
        await session.write(SessionRequest(submits=[submit(handle, kind) for handle, kind in enumerate(KINDS)]))
        answers: dict[int, Any] = {}
        while len(answers) < len(KINDS):
            for output in (await session.read()).outputs:
                assert output.handle not in answers
                answers[output.handle] = output
        for handle, kind in enumerate(KINDS):
            output = answers[handle]
            assert [field.name for field, _ in output.ListFields() if field.name != "handle"] == ["timeline", kind]
            assert values_of(output) == WHOLE["values"]
        assert worker.front.is_idle()
        await session.write(SessionRequest(submits=[submit(0, "score")]))
        assert (await session.read()).outputs[0].HasField("score"), "its handle is free again"
        session.cancel()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_direct_client_gets_one_response(kind: str) -> None:
    async with served_front(model=ABLE) as worker, open_channel(worker.address) as channel:
        request = WorkerServiceGenerateRequest(submit=submit(1, kind))
        (response,) = [response async for response in WorkerServiceStub(channel).Generate(request)]
        assert (response.WhichOneof("output"), values_of(response)) == (kind, WHOLE["values"])
        assert is_idle(worker)


async def test_a_pair_of_texts_is_refused_if_the_model_takes_none() -> None:
    model = GetModelResponse()
    model.CopyFrom(ABLE)
    model.pooling.takes_no_pairs = True
    async with served_front(model=model) as worker, open_channel(worker.address) as channel:
        pair = submit(1, "score")
        pair.first_segment_tokens = 1
        with pytest.raises(grpc.aio.AioRpcError, match="has no template for a query and a document"):
            async for _ in WorkerServiceStub(channel).Generate(WorkerServiceGenerateRequest(submit=pair)):
                pass
        assert is_idle(worker)


def is_idle(worker: ServedFront) -> bool:
    return worker.front.is_idle() and not worker.backlog.all_bytes
