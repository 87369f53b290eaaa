"""A router sends workers only what it has checked."""

from tests.router.cluster import cluster
from tests.router.fake_worker import FakeWorker
from trunkline.v1.generation_pb2 import SamplingParams

UNKNOWN_FIELD = bytes([0xC0, 0x3E, 7])  # number 1000, a varint


async def test_workers_do_not_get_fields_that_their_router_does_not_know() -> None:
    worker = FakeWorker("a")
    async with cluster(worker) as router:
        sampling = SamplingParams.FromString(SamplingParams(max_tokens=3).SerializeToString() + UNKNOWN_FIELD)
        assert UNKNOWN_FIELD in sampling.SerializeToString()
        await router.answer([1, 2, 3], sampling=sampling)
    (submit,) = worker.submits
    assert submit.sampling.max_tokens == 3
    assert UNKNOWN_FIELD not in submit.sampling.SerializeToString()
