"""Vectors and scores with both clients, from a real router before fake workers."""

import asyncio

import pytest

from tests.router.cluster import cluster
from tests.router.fake_worker import FakeWorker, score_of, vector_of
from trunkline import Client, SyncClient
from trunkline.errors import InvalidRequest
from trunkline.v1.generation_pb2 import Lane
from trunkline.v1.worker_pb2 import Capability, PoolingModel

CAPABILITIES = [Capability.CAPABILITY_VECTORS, Capability.CAPABILITY_SCORES]
MODEL = PoolingModel(dimensions=2, prompts={"query": "q: "})


async def test_inputs_keep_their_order_and_options_arrive() -> None:
    worker = FakeWorker("w", capabilities=CAPABILITIES, pooling=MODEL)
    async with cluster(worker) as router, Client(f"127.0.0.1:{router.port}") as client:
        found = await client.embed(["hi", [5, 6, 7]], request_id="r", lane="batch", prompt_name="query", raw=True)
        assert [list(vector) for vector in found.vectors] == [
            vector_of(submit.prompt_token_ids) for submit in worker.submits
        ]
        assert {(submit.request_id, submit.lane, submit.work.raw) for submit in worker.submits} == {
            ("r", Lane.LANE_BATCH, True)
        }
        assert found.usage.prompt_tokens == len("<q: hi") + 3
        assert len((await client.embed("hi")).vectors) == 1
        with pytest.raises(InvalidRequest, match="inputs"):
            await client.embed([])
        worker.submits.clear()
        scores = await client.score(["a", "bc"], queries="why", truncate_prompt_tokens=4)
        assert scores.values == [[pytest.approx(score_of(submit.prompt_token_ids))] for submit in worker.submits]
        assert sum(scores.prompt.truncated_tokens) > 0
        assert [model.task for model in await client.list_models()] == ["generate"]


async def test_the_blocking_client_gets_the_same() -> None:
    worker = FakeWorker("w", capabilities=CAPABILITIES, pooling=MODEL)
    async with cluster(worker) as router, Client(f"127.0.0.1:{router.port}") as client:
        with SyncClient(f"127.0.0.1:{router.port}") as blocking:
            for inputs in (["hi", "there"], "hi"):
                vectors = await asyncio.to_thread(blocking.embed, inputs)
                assert vectors.vectors == (await client.embed(inputs)).vectors
            scores = await asyncio.to_thread(blocking.score, ["a", "b"], queries=["c", "d"])
            assert scores.values == (await client.score(["a", "b"], queries=["c", "d"])).values
