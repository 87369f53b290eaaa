"""Deadlines that are nearly over, or nearly without end, on both ways to an answer."""

import grpc
import pytest

from tests.router.cluster import cluster, refusal, until
from tests.router.direct_rig import KEY, direct, fakes
from tests.router.fake_worker import FakeWorker
from trunkline.errors import DeadlineExceeded

PROMPT = list(range(5, 25))
YEAR_S = 365.25 * 86_400
SHORT_S = [0.0, 1e-9, 1e-6, 1e-5]
LONG_S = [YEAR_S, 1e9, 100 * YEAR_S]  # past the year 2262 gRPC's own clocks overflow


@pytest.mark.parametrize("timeout_s", SHORT_S)
async def test_a_deadline_of_nothing_ends_the_request_and_the_next_one_is_answered(timeout_s: float) -> None:
    worker = FakeWorker("a", answer=None)  # a loaded machine may answer before gRPC looks at its timers
    async with cluster(worker) as router:
        for _ in range(20):
            refused = await refusal(router.generate(PROMPT, timeout_s=timeout_s))
            assert refused.code == grpc.StatusCode.DEADLINE_EXCEEDED
        worker.answer = 3
        assert await router.answer(PROMPT)
        await until(lambda: worker.num_running == 0)


@pytest.mark.parametrize("timeout_s", LONG_S)
async def test_a_deadline_of_years_is_as_good_as_none(timeout_s: float) -> None:
    worker = FakeWorker("a")
    async with cluster(worker) as router:
        assert await router.answer(PROMPT, timeout_s=timeout_s)
        assert await router.answer(PROMPT, timeout_s=None)
    with_one, without = worker.submits
    assert not without.HasField("timeout")
    if with_one.HasField("timeout"):
        assert with_one.timeout.ToSeconds() > 0.9 * YEAR_S


@pytest.mark.parametrize("timeout_s", [*SHORT_S[1:], *LONG_S])
async def test_a_grant_takes_any_deadline(timeout_s: float) -> None:
    (worker,) = fakes("a", answer=1 if timeout_s > 1 else None)
    async with cluster(worker, grant_key=KEY) as router, direct(router) as client:
        try:
            done = await client.complete(PROMPT, timeout_s=timeout_s)
        except DeadlineExceeded:
            assert timeout_s < 1
        else:
            assert timeout_s > 1
            assert done.choices[0].token_ids
        worker.answer = 1
        assert (await client.complete(PROMPT)).choices[0].token_ids
        await until(lambda: worker.num_running == 0)
