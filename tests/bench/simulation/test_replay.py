"""A replay ends or raises an error, and its figures cover the whole run, by lane."""

from dataclasses import replace

import pytest

from trunkline.status import CONTEXT_LENGTH_EXCEEDED
from trunkline_bench.simulation import report
from trunkline_bench.simulation.costs.device_profile import PROFILES
from trunkline_bench.simulation.traces.trace_request import TraceRequest
from trunkline_bench.simulation.worker.replay import replay
from trunkline_bench.simulation.worker.simulated_worker import WorkerSpec
from trunkline_worker.engine.engine import Engine
from trunkline_worker.scheduler.limits import Batching, SchedulerLimits

LIMITS = SchedulerLimits(max_step_tokens=1024, batching=Batching.DYNAMIC, batch_size=8, batch_window_s=0.5)
WORKER = WorkerSpec(PROFILES["h200-8b"], 100, 16, replace(LIMITS, batching=Batching.CONTINUOUS))


def request(arrival_s: float, output_tokens: int = 3, lane: str = "standard") -> TraceRequest:
    return TraceRequest(arrival_s, 5, output_tokens, lambda: [3, 4, 5, 6, 7], lane)


def too_long(arrival_s: float, prompt_tokens: int = 1600) -> TraceRequest:
    def never() -> list[int]:
        raise MemoryError("the prompt of a refused request was made")

    return TraceRequest(arrival_s, prompt_tokens, 3, never)


def test_a_request_longer_than_the_worker_holds_is_refused_without_its_prompt_being_made() -> None:
    assert WORKER.max_total_tokens == 1600
    run = replay([too_long(0.0, 10**9), request(1.0), too_long(2.0)], WORKER)
    assert [outcome.refused for outcome in run.outcomes] == [CONTEXT_LENGTH_EXCEEDED, "", CONTEXT_LENGTH_EXCEEDED]
    assert [run.outcomes[0].done_s, run.outcomes[2].done_s] == [0.0, 2.0]
    assert run.outcomes[1].output_tokens == 3
    assert run.duration_s == 2.0


def test_the_longest_request_that_fits_is_served() -> None:
    fitting = TraceRequest(0.0, 1599, 1, lambda: [3] * 1599)
    assert replay([fitting], WORKER).outcomes[0].output_tokens == 1


def test_a_run_in_which_everything_was_refused_has_a_row() -> None:
    run = replay([too_long(0.0)], WORKER)
    assert run.duration_s == 0.0
    assert report.row(run) == ["0", "-", "-", "-", "-", "-", "0", "1"]


@pytest.mark.parametrize("until_s", [100.0, float("inf")])
def test_a_stuck_engine_is_an_error(monkeypatch: pytest.MonkeyPatch, until_s: float) -> None:
    monkeypatch.setattr(Engine, "wakes_s", lambda engine: None)  # so that the batch is never closed
    with pytest.raises(RuntimeError, match=r"2 requests are left at 0\.250 s of virtual time"):
        replay([request(0.0), request(0.25)], replace(WORKER, limits=LIMITS), until_s=until_s)


def test_a_batch_that_waits_for_its_window_is_waited_for() -> None:
    run = replay([request(0.0), request(0.25)], replace(WORKER, limits=LIMITS))
    assert [outcome.output_tokens for outcome in run.outcomes] == [3, 3]
    assert 0.5 < run.duration_s < 0.6


def test_a_replay_ends_at_the_given_time() -> None:
    assert replay([request(0.0), request(50.0)], WORKER, until_s=10.0).duration_s == 10.0


def test_times_between_tokens_cover_the_whole_run() -> None:
    run = replay([request(0.0, 20), *(request(600.0 * i, 1) for i in range(1, 4))], WORKER)
    itl_s = run.stats.lanes[1].itl_s
    assert itl_s.count == 19
    assert itl_s.p50 == pytest.approx(0.004, rel=0.1)


def test_a_run_with_several_lanes_has_a_row_for_each() -> None:
    requests = [request(0.0, 3, "interactive"), request(0.0, 50, "batch"), request(9.0, 5, "batch"), too_long(10.0)]
    run = replay(requests, WORKER)
    rows = report.rows("continuous", run)
    names = ["all lanes", "interactive", "standard", "batch"]
    assert list(rows) == [f"continuous, {name}" for name in names]
    columns = {column: [row[i] for row in rows.values()] for i, column in enumerate(report.COLUMNS)}
    assert columns["refused"] == ["1", "0", "1", "0"]
    assert columns["output tok/s"] == ["6", "0", "0", "6"]
    assert columns["ITL p50 / p99, ms"][0] == columns["ITL p50 / p99, ms"][2] == "-", "counted by lane; nothing served"
    assert columns["padding"][1:] == columns["preemptions"][1:] == ["-"] * 3, "steps serve all lanes at once"
    for lane, row in zip(names[1:], list(rows.values())[1:], strict=True):
        first = report.ttfts(run, lane)
        assert row[1] == (report.seconds(first, 0.5, 0.9, 0.99) if first else "-")
    assert columns["ITL p50 / p99, ms"][1] != "-" != columns["ITL p50 / p99, ms"][3]


def test_a_run_with_one_lane_has_one_row_with_everything() -> None:
    run = replay([request(0.0), request(1.0)], WORKER)
    assert report.rows("continuous", run) == {"continuous": report.row(run)}
    assert "-" not in report.row(run)


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_prompts_computed_token_by_token_do_not_count_as_decodes(run_ahead: int) -> None:
    worker = replace(WORKER, limits=SchedulerLimits(max_step_tokens=1), run_ahead=run_ahead)
    requests = [TraceRequest(10.0 * i, 80, 40, lambda: [3] * 80) for i in range(2)]
    fast, slow = (replay(requests, replace(worker, fast_forward=forward)) for forward in (True, False))
    assert fast.outcomes == slow.outcomes
    assert [outcome.output_tokens for outcome in fast.outcomes] == [40, 40]
