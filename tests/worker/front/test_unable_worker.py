"""A worker that is asked for what it cannot do refuses it by name, over each of its RPCs, and goes on with the rest."""

from typing import Any

import grpc
import pytest

from tests.router.cluster import refusal
from tests.worker.front.served_front import MODEL, served_front
from trunkline.status import INVALID_REQUEST
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.worker_pb2 import (
    Adapter,
    BlockSource,
    CacheTier,
    Capability,
    GetModelResponse,
    Grammar,
    GrammarKind,
    OutputKind,
    SessionHello,
    SessionRequest,
    Submit,
    WatchCacheRequest,
    WatchedTier,
    Work,
    WorkerServiceGenerateRequest,
)
from trunkline.v1.worker_pb2_grpc import WorkerServiceStub
from trunkline_runtime.channel import open_channel

ASKED: dict[str, dict[str, Any]] = {
    "adapter": {"work": Work(adapter=Adapter(id="a", version="1"))},
    "grammar": {"work": Work(grammar=Grammar(kind=GrammarKind.GRAMMAR_KIND_REGEX, text="a"))},
    "model": {
        "work": Work(output=OutputKind.OUTPUT_KIND_VECTOR),
        "sampling": SamplingParams(seed=1, max_tokens=0),
    },
    "block_sources": {"block_sources": [BlockSource(num_blocks=1, tier=CacheTier.CACHE_TIER_HOST)]},
    "hand_over_after": {"hand_over_after": 1},
}
# Besides, what only a newer version knows.
REFUSED: dict[str, dict[str, Any]] = {
    **ASKED,
    "sampling": {"sampling": SamplingParams.FromString(SamplingParams(seed=1).SerializeToString() + b"\xf8\x07\x01")},
    "work": {"work": Work.FromString(b"\xf8\x07\x01")},
}
TIERS = WatchCacheRequest(tiers=[WatchedTier(tier=CacheTier.CACHE_TIER_HOST, stride=4)])


def submit(handle: int, **asked: Any) -> Submit:
    sampling = asked.pop("sampling", SamplingParams(seed=1, max_tokens=1))
    return Submit(handle=handle, prompt_token_ids=[5, 6], sampling=sampling, **asked)


async def rest_of(session: Any) -> None:
    while await session.read() is not grpc.aio.EOF:
        pass


async def test_in_a_session_each_is_refused_by_name_and_other_submits_are_answered() -> None:
    async with served_front() as worker, open_channel(worker.address) as channel:
        session: Any = WorkerServiceStub(channel).Session()
        await session.read()
        submits = [submit(handle, **asked) for handle, asked in enumerate(REFUSED.values(), 1)]
        await session.write(SessionRequest(hello=SessionHello(router_id="r"), submits=[*submits, submit(99)]))
        ended: dict[int, str] = {}
        while 99 not in ended:
            for output in (await session.read()).outputs:
                ended[output.handle] = output.error.field if output.HasField("error") else "answered"
        assert ended == {**dict(enumerate(REFUSED, 1)), 99: "answered"}
        session.cancel()


@pytest.mark.parametrize("field", REFUSED)
async def test_a_direct_client_is_refused_as_well(field: str) -> None:
    async with served_front() as worker, open_channel(worker.address) as channel:
        call = WorkerServiceStub(channel).Generate(WorkerServiceGenerateRequest(submit=submit(1, **REFUSED[field])))
        refused = await refusal(call)
        assert (refused.code, refused.reason, refused.field) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            INVALID_REQUEST,
            field,
        )


@pytest.mark.parametrize("asked", [{"grammars": [Grammar(text="x")]}, {"dropped_grammars": [b"d"]}])
async def test_grammars_end_the_session_of_a_worker_without_them(asked: dict[str, Any]) -> None:
    async with served_front() as worker, open_channel(worker.address) as channel:
        session: Any = WorkerServiceStub(channel).Session()
        await session.read()
        await session.write(SessionRequest(**asked))
        ended = await refusal(rest_of(session))
        assert (ended.reason, ended.field) == (INVALID_REQUEST, "grammar")


async def test_tiers_are_refused_by_a_worker_without_them() -> None:
    async with served_front() as worker, open_channel(worker.address) as channel:
        refused = await refusal(WorkerServiceStub(channel).WatchCache(TIERS))
        assert (refused.reason, refused.field) == (INVALID_REQUEST, "tiers")


async def test_what_a_worker_lists_is_not_refused() -> None:
    able = GetModelResponse()
    able.CopyFrom(MODEL)
    able.capabilities[:] = [one for one in Capability.values() if one]
    async with served_front(model=able) as worker, open_channel(worker.address) as channel:
        stub = WorkerServiceStub(channel)
        for asked in ASKED.values():
            call: Any = stub.Generate(WorkerServiceGenerateRequest(submit=submit(1, **asked)))
            answer = [(response.WhichOneof("output"), response.chunk.token_ids[:]) async for response in call]
            assert answer == ([("vector", [])] if "sampling" in asked else [("chunk", [5])])
        watch: Any = stub.WatchCache(TIERS)
        assert (await watch.read()).HasField("snapshot")
        watch.cancel()
