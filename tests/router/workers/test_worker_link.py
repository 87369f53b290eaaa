"""Through real gRPC: routing follows what workers report, and workers may come, go and come back."""

import asyncio
from random import Random
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from tests.router.cluster import Cluster, cluster, refusal, until
from tests.router.fake_worker import FakeWorker
from tests.router.tokenizer_files import tokenizer_files
from trunkline.v1.inference_pb2 import ListModelsRequest
from trunkline.v1.worker_pb2 import CacheEvent
from trunkline_bench.servers.ports import free_port
from trunkline_router.workers.cache_follower import CacheFollower
from trunkline_router.workers.link_context import LinkSecurity
from trunkline_router.workers.worker_link import LOADING_S, WorkerLink

PREFIX = list(range(10, 74))  # 16 blocks


async def served_by(router: Cluster, prompt: list[int]) -> tuple[str, int]:
    """(worker, cached tokens) of one request."""
    info = (await router.answer(prompt))[0].prompt
    return info.worker_id, info.cached_tokens


async def test_routing_follows_the_cache_wherever_it_is() -> None:
    a, b = FakeWorker("a"), FakeWorker("b")
    async with cluster(a, b) as router:
        b.cache_prompt(PREFIX)
        await until(lambda: len(router.connected(1).blocks) == 16)
        assert await served_by(router, [*PREFIX, 1]) == ("b", 64)
        b.evict([*PREFIX, 1])
        a.cache_prompt(PREFIX)
        await until(lambda: len(router.connected(0).blocks) == 16 and not len(router.connected(1).blocks))
        assert await served_by(router, [*PREFIX, 2]) == ("a", 64)


async def test_what_a_worker_cached_before_the_router_came_is_known_from_its_snapshot() -> None:
    a, b = FakeWorker("a"), FakeWorker("b")
    b.cache_prompt(PREFIX)
    async with cluster(a, b) as router:
        assert await served_by(router, [*PREFIX, 1]) == ("b", 64)


async def test_unrelated_requests_that_run_at_once_spread() -> None:
    workers = [FakeWorker(name, answer=None) for name in "abc"]
    async with cluster(*workers) as router:
        calls = [router.generate([token] * 40) for token in range(10, 40)]
        await until(lambda: sum(len(worker.submits) for worker in workers) == 30)
        assert [len(worker.submits) for worker in workers] == [10, 10, 10]
        for worker in workers:
            for _ in range(10):
                (await worker.arrived.get()).tokens(1, finish=True)
        for call in calls:
            _ = [response async for response in call]


async def test_a_burst_with_one_prefix_stays_together_before_the_worker_has_reported_it() -> None:
    workers = [FakeWorker(name, answer=None) for name in "ab"]
    prefix = list(range(10, 200)) * 5
    async with cluster(*workers) as router:
        calls = [router.generate([*prefix, 1])]
        await until(lambda: sum(len(worker.submits) for worker in workers) == 1)
        holder = next(worker for worker in workers if worker.submits)
        # It has begun and told its load, but none of its blocks: what is known of them is only expected.
        choice = await holder.arrived.get()
        holder.cached.update(holder.hashes(prefix))
        choice.tokens(1)
        await calls[0].read()
        calls += [router.generate([*prefix, number]) for number in range(2, 8)]
        await until(lambda: sum(len(worker.submits) for worker in workers) == 7)
        assert not len(router.connected(workers.index(holder)).blocks)
        assert len(holder.submits) == 7
        for call in calls:
            call.cancel()
        await until(lambda: not any(worker.num_running for worker in workers))


async def test_a_gap_in_the_events_leads_to_a_new_snapshot() -> None:
    worker = FakeWorker("a")
    async with cluster(worker) as router:
        worker.cache_prompt(PREFIX[:32])
        worker.lose_an_event()
        worker.cache_prompt(PREFIX)
        await until(lambda: worker.snapshots == 2 and len(router.connected(0).blocks) == 16)


async def test_a_broken_watch_is_opened_again_while_requests_go_on() -> None:
    worker = FakeWorker("a", answer=None)
    async with cluster(worker) as router:
        call = router.generate(PREFIX)
        choice = await worker.arrived.get()
        worker.end_watches()
        await until(lambda: worker.snapshots == 2)
        choice.tokens(2, finish=True)
        assert [r async for r in call][-1].usage.completion_tokens == 2
        await until(lambda: len(router.connected(0).blocks) == 16)


async def test_a_new_life_of_a_worker_starts_with_nothing_held() -> None:
    worker = FakeWorker("a")
    async with cluster(worker) as router:
        worker.cache_prompt(PREFIX)
        await until(lambda: len(router.connected(0).blocks) == 16)
        before = router.connected(0)
        await worker.die()
        await router.until_workers(False)
        assert (await refusal(router.generate(PREFIX))).code == grpc.StatusCode.UNAVAILABLE
        worker.epoch, worker.sequence = 2, 0
        worker.cached.clear()
        await worker.start()
        await router.until_workers(True)
        assert router.connected(0) is not before
        assert not len(router.connected(0).blocks)
        assert await served_by(router, PREFIX) == ("a", 0)


async def test_an_epoch_that_changes_under_a_connection_is_a_new_life() -> None:
    worker = FakeWorker("a")
    async with cluster(worker) as router:
        before = router.connected(0)
        worker.epoch = 2
        worker.cache_prompt(PREFIX)
        await until(lambda: router.links[0].worker not in (None, before))
        assert len(router.connected(0).blocks) == 16


async def test_a_draining_worker_gets_nothing_new() -> None:
    a, b = FakeWorker("a"), FakeWorker("b")
    a.cache_prompt(PREFIX)
    async with cluster(a, b) as router:
        a.send_load(draining=True)
        await until(lambda: not router.connected(0).accepts)
        assert await served_by(router, [*PREFIX, 1]) == ("b", 0)
        models = (await router.stub.ListModels(ListModelsRequest())).models
        assert models[0].ready_workers == 1


async def test_a_loaded_workers_samples_send_requests_elsewhere() -> None:
    a, b = FakeWorker("a"), FakeWorker("b")
    a.cache_prompt(PREFIX)
    async with cluster(a, b) as router:
        a.send_load(running=3, waiting=5, uncached_tokens_by_lane=[5000, 0, 0])
        await until(lambda: router.connected(0).load.waiting == 5)
        assert (await served_by(router, [*PREFIX, 1]))[0] == "b"


async def test_the_tokenizer_is_fetched_once_for_a_pool() -> None:
    workers = [FakeWorker(name) for name in "abc"]
    async with cluster(*workers):
        pass
    assert sum(worker.tokenizer_calls for worker in workers) == 1


async def test_a_worker_with_damaged_tokenizer_files_disturbs_nobody() -> None:
    good, bad = FakeWorker("good"), FakeWorker("bad", files=tokenizer_files())
    bad.files["tokenizer.json"] = b'{"version": "1.0", "trunc'
    bad.tokenizer_digest = b"another"
    async with cluster(good, bad, expected=(True, False)) as router:
        assert await served_by(router, PREFIX) == ("good", 0)
        await until(lambda: bad.asked >= 3)
        assert bad.tokenizer_calls == 1, "they are the same, as long as the worker is"


async def test_workers_of_one_model_with_other_weights_are_matched_by_their_own_hashes() -> None:
    a, b = FakeWorker("a", fingerprint="weights-1"), FakeWorker("b", fingerprint="weights-2", block_size=8)
    b.cache_prompt(PREFIX)
    async with cluster(a, b) as router:
        assert await served_by(router, [*PREFIX, 1]) == ("b", 64)


async def test_a_request_too_long_for_one_worker_goes_to_the_one_that_has_room() -> None:
    a, b = FakeWorker("a", kv_token_capacity=32), FakeWorker("b")
    a.cache_prompt(PREFIX)
    async with cluster(a, b) as router:
        assert (await served_by(router, [*PREFIX, 1]))[0] == "b"


async def test_two_workers_that_call_themselves_the_same_both_get_work() -> None:
    workers = [FakeWorker("same", answer=None, epoch=epoch) for epoch in (1, 2)]
    async with cluster(*workers) as router:
        calls = [router.generate([token] * 40) for token in range(10, 20)]
        await until(lambda: sum(len(worker.submits) for worker in workers) == 10)
        assert [len(worker.submits) for worker in workers] == [5, 5]
        for call in calls:
            call.cancel()
        await until(lambda: not any(worker.num_running for worker in workers))


async def test_the_choices_of_a_request_leave_in_one_message_and_so_do_their_aborts() -> None:
    worker = FakeWorker("a", answer=None)
    async with cluster(worker) as router:
        call = router.generate(PREFIX, n=4)
        await until(lambda: worker.num_running == 4)
        call.cancel()
        await until(lambda: worker.num_running == 0)
    hello, submits, aborts = worker.messages
    assert hello.hello.router_id == "router-1"
    assert len(submits.submits) == 4
    assert sorted(aborts.abort_handles) == sorted(submit.handle for submit in submits.submits)


@pytest.mark.parametrize("nonsense", [{"block_size": 0}, {"model": ""}, {"context_length": 0}], ids=str)
async def test_a_worker_whose_limits_make_no_sense_gets_no_requests(nonsense: dict[str, Any]) -> None:
    good, odd = FakeWorker("good"), FakeWorker("odd", **nonsense)
    async with cluster(good, odd, expected=(True, False)) as router:
        await until(lambda: odd.asked >= 2)
        assert await served_by(router, PREFIX) == ("good", 0)


async def test_a_bug_in_one_workers_link_ends_neither_the_link_nor_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = FakeWorker("a")
    async with cluster(worker) as router:
        before = router.connected(0)

        def broken(self: CacheFollower, item: object) -> bool:
            monkeypatch.undo()
            raise KeyError("a bug")

        monkeypatch.setattr(CacheFollower, "work", broken)
        worker.cache_prompt(PREFIX)
        await until(lambda: router.links[0].worker not in (None, before))
        assert len(router.connected(0).blocks) == 16


async def test_an_event_of_a_kind_that_this_router_does_not_know_changes_nothing() -> None:
    worker = FakeWorker("a")
    async with cluster(worker) as router:
        worker.cache_prompt(PREFIX)
        worker.tell(CacheEvent())
        worker.cache_prompt([*PREFIX, 1, 2, 3, 4])
        await until(lambda: len(router.connected(0).blocks) == 17)
    assert worker.snapshots == 1


async def test_a_worker_that_still_loads_is_no_warning_until_a_minute_has_passed() -> None:
    now_s = 100.0
    context: Any = SimpleNamespace(
        clock_s=lambda: now_s, on_change=lambda: None, rng=Random(0), security=LinkSecurity()
    )
    link = WorkerLink(f"127.0.0.1:{free_port()}", context)
    with capture_logs() as lines:
        running = asyncio.create_task(link.run())
        await until(lambda: len(lines) == 1)
        now_s += LOADING_S
        await until(lambda: len(lines) == 2)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert [(line["event"], line["log_level"]) for line in lines] == [
        ("worker not connected", "info"),
        ("worker not connected", "warning"),
    ]
