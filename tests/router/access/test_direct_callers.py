"""The direct path tells its client the worker and what is cached there, so it is closed to callers that may not see
either. Their clients are served through the router."""

import logging
from pathlib import Path

import pytest

from tests.router.access.callers import Keys, router_of
from tests.router.direct_rig import KEY, PROMPT, direct
from tests.router.fake_worker import FakeWorker

WORKER = "the-worker-1"
CALLERS = ["sees the cache", "without sees_cache", "anonymous"]


@pytest.mark.parametrize("caller", CALLERS)
async def test_only_callers_that_see_the_cache_use_the_direct_path(
    tmp_path: Path, caller: str, caplog: pytest.LogCaptureFixture
) -> None:
    keys = Keys(tmp_path / "keys.json")
    credentials = {"sees the cache": keys.add(), "without sees_cache": keys.add(sees_cache=False), "anonymous": None}
    async with (
        router_of(keys, FakeWorker(WORKER, grant_key=KEY), grant_key=KEY, allows_anonymous=True) as router,
        direct(router.inner, api_key=credentials[caller]) as client,
    ):
        with caplog.at_level(logging.WARNING, "trunkline.client.direct"):
            answers = [await client.complete(PROMPT, max_tokens=4) for _ in range(2)]
    is_direct = caller == CALLERS[0]
    assert all(answer.choices[0].token_ids for answer in answers), "each is served"
    assert [answer.prompt.worker_id for answer in answers] == [WORKER if is_direct else ""] * 2
    said = [record.getMessage() for record in caplog.records if record.name == "trunkline.client.direct"]
    refused = "not direct, through the router: these credentials may not use the direct path"
    assert [line.startswith(refused) for line in said] == ([] if is_direct else [True]), said
