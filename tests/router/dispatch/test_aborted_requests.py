"""A request whose client gives up is told of with what its worker says became of it."""

import asyncio
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from tests.router.cluster import Cluster, cluster, until
from tests.router.fake_worker import FakeWorker
from trunkline.v1.fleet_pb2 import GetRequestRequest, ListRequestsRequest
from trunkline.v1.worker_pb2 import Timeline
from trunkline_router.record.request_observer import RequestObserver
from trunkline_router.record.request_record import RequestRecord
from trunkline_router.record.ttft_parts import QUEUE
from trunkline_router.workers import session_outputs

PROMPT = list(range(5, 25))
WAITED_S = 0.25  # in the worker's queue: longer than anything else takes, on a busy machine too


class Keeper:
    """The records of requests that were told of."""

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []
        self.observer = RequestObserver(listeners=[self.request_ended])

    def request_ended(self, record: RequestRecord) -> None:
        self.records.append(record)


async def give_up(router: Cluster, worker: FakeWorker) -> None:
    """A client sends a request, waits, and gives up."""
    call = router.generate(PROMPT, request_id="tired")
    await worker.arrived.get()
    await asyncio.sleep(WAITED_S)
    call.cancel()
    assert await call.code() is grpc.StatusCode.CANCELLED


def closing_line(logs: list[Any]) -> Any:
    (line,) = [line for line in logs if line["event"] == "request ended"]
    return line


async def test_a_client_that_gave_up_waited_in_the_worker_s_queue() -> None:
    worker = FakeWorker("a", answer=None)
    async with cluster(worker) as router:
        with capture_logs() as logs:
            await give_up(router, worker)
            await until(lambda: not router.inference.observer.running)
        told = await router.fleet.GetRequest(GetRequestRequest(request_id="tired"))
        listed = await router.fleet.ListRequests(ListRequestsRequest())
    line = closing_line(logs)
    assert line["outcome"] == "cancelled"
    assert WAITED_S * 1e3 <= line["queue_ms"] <= line["duration_ms"]
    assert told.summary.cause == listed.requests[0].cause == QUEUE
    (attempt,) = told.attempts_made
    assert attempt.choices[0].ended_s <= attempt.end_s


async def test_of_a_worker_that_says_nothing_the_cost_is_not_told() -> None:
    worker = FakeWorker("a", answer=None, answers_aborts=False)
    async with cluster(worker) as router:
        with capture_logs() as logs:
            await give_up(router, worker)
            await until(lambda: not router.inference.observer.running)
        told = await router.fleet.GetRequest(GetRequestRequest(request_id="tired"))
    line = closing_line(logs)
    assert "cost" not in line
    assert "queue_ms" not in line
    assert not told.HasField("cost")


async def test_quotas_and_the_count_of_running_requests_wait_for_nothing() -> None:
    worker, keeper = FakeWorker("a", answer=None, answers_aborts=False), Keeper()
    async with cluster(worker, observer=keeper.observer) as router:
        await give_up(router, worker)
        await until(lambda: bool(worker.aborted))
        assert router.inference.running.num_running == 0
        assert router.connected(0).open_choices == 0
        (record,) = keeper.observer.running.values()
        assert (record.ended_s is not None, record.awaited, keeper.records) == (True, 1, [])
    assert [record.request_id for record in keeper.records] == ["tired"]


async def test_a_stop_of_the_router_tells_at_once_of_those_that_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_outputs, "PATIENCE_S", 3600.0)
    worker, keeper = FakeWorker("a", answer=None, answers_aborts=False), Keeper()
    async with cluster(worker, observer=keeper.observer) as router:
        await give_up(router, worker)
        await until(lambda: bool(worker.aborted))
        assert not keeper.records
    assert [record.request_id for record in keeper.records] == ["tired"], "without an hour's wait"


async def test_an_answer_that_ends_while_its_abort_is_under_way_is_told_of_with_its_timeline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session_outputs, "PATIENCE_S", 3600.0)
    worker, keeper = FakeWorker("a", answer=None, answers_aborts=False), Keeper()
    async with cluster(worker, observer=keeper.observer) as router:
        call = router.generate(PROMPT)
        choice = await worker.arrived.get()
        call.cancel()
        await until(lambda: bool(worker.aborted))
        choice.tokens(1, finish=True, timeline=Timeline(ended_s=0.001))
        await until(lambda: bool(keeper.records))
    assert len(keeper.records[0].attempts[0].timelines) == 1
