"""The key of grants: workers and routers with another, or with none, or with a clock of their own."""

import pytest

from tests.router.cluster import cluster, until
from tests.router.direct_rig import KEY, PROMPT, direct, fakes
from trunkline_router.main import router_settings


async def test_where_no_grants_are_given_or_taken_answers_come_through_the_router(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for router_key, worker_key in ((b"", b""), (KEY, b"")):
        (worker,) = fakes("a", answer=2, grant_key=worker_key)
        async with cluster(worker, grant_key=router_key) as router, direct(router) as client:
            caplog.clear()
            for _ in range(2):
                assert (await client.complete(PROMPT)).choices[0].token_ids == [0, 1]
            assert [record.getMessage() for record in caplog.records if "--grant-key" in record.getMessage()] != []
            assert len([record for record in caplog.records if record.name == "trunkline.client.direct"]) == 1
            assert len([message for message in worker.messages if message.submits]) == 2
        assert KEY.decode() not in caplog.text


@pytest.mark.parametrize("router_key", [b"", KEY[::-1]])
async def test_a_worker_with_another_key_is_left_alone_and_says_why(router_key: bytes) -> None:
    workers = [*fakes("a", answer=1), *fakes("b", answer=1, grant_key=router_key)]
    async with cluster(*workers, grant_key=router_key, expected=(False, True)) as router:
        for _ in range(4):
            assert (await router.answer(PROMPT))[0].prompt.worker_id == "b"
        await until(lambda: "--grant-key" in router.links[0].problem)


async def test_a_worker_that_refuses_a_routers_proof_is_left_alone_and_its_reason_told_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    workers = [*fakes("a", clock_ahead_s=60.0), *fakes("b", answer=1)]
    async with cluster(*workers, grant_key=KEY, expected=(False, True)) as router:
        await until(lambda: workers[0].asked >= 3)
        assert "too long ago: the clocks must agree" in router.links[0].problem
        assert (await router.answer(PROMPT))[0].prompt.worker_id == "b"
    assert capsys.readouterr().out.count("the clocks must agree") == 1


def test_a_key_that_can_be_guessed_starts_nothing_and_is_not_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRUNKLINE_GRANT_KEY", "hunter2")
    with pytest.raises(SystemExit) as caught:
        router_settings(["--workers=127.0.0.1:1"])
    said = capsys.readouterr().err
    assert (caught.value.code, said.count("\n")) == (2, 1)
    assert "--grant-key" in said
    assert "hunter2" not in said


async def test_only_workers_with_the_routers_key_are_granted() -> None:
    workers = [*fakes("a", "b", answer=1, grant_key=b""), *fakes("c", answer=1)]
    async with cluster(*workers, grant_key=KEY) as router, direct(router) as client:
        for _ in range(6):
            assert (await client.complete(PROMPT)).prompt.worker_id == "c"


NEW = KEY[::-1]
STAGES = {  # of routers and workers: (newest key, previous key)
    "before": (KEY, b""),
    "during": (NEW, KEY),
    "after": (NEW, b""),
}


@pytest.mark.parametrize(
    ("routers", "workers"),
    [(a, b) for a in STAGES for b in STAGES if {a, b} != {"before", "after"}],
)
async def test_while_the_key_is_changed_no_request_is_refused_and_direct_clients_stay_direct(
    routers: str, workers: str
) -> None:
    (key, previous), (worker_key, worker_previous) = STAGES[routers], STAGES[workers]
    (worker,) = fakes("a", answer=2, grant_key=worker_key, previous_key=worker_previous)
    async with cluster(worker, grant_key=key, previous_key=previous) as router, direct(router) as client:
        assert (await router.answer(PROMPT))[0].prompt.worker_id == "a"
        assert (await client.complete(PROMPT)).choices[0].token_ids == [0, 1]
        assert len([message for message in worker.messages if message.submits]) == 1, "the second went directly"


async def test_routers_with_both_keys_serve_workers_of_both_ages_at_once() -> None:
    workers = [*fakes("a", answer=1), *fakes("b", answer=1, grant_key=NEW)]
    async with cluster(*workers, grant_key=NEW, previous_key=KEY) as router, direct(router) as client:
        for _ in range(6):
            await client.complete(PROMPT)
        assert not any(message.submits for worker in workers for message in worker.messages)
