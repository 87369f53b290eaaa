"""`make bench-aiperf`: what it reads in aiperf's summaries, two of which were recorded."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trunkline_bench.http_load.report import report
from trunkline_bench.http_load.runs import RUNS, TURNS, WHOLE, LoadRun
from trunkline_bench.http_load.summary import COLUMNS, cancelled_and_errors, excerpt, faults

RUN = LoadRun("chat", "chat", at_once=16, requests=64, extra=WHOLE)
WITH_CANCELLATIONS = replace(RUN, name="chat, some cancelled", cancels=True)
BAD_REQUEST = {"error_details": {"code": 400, "type": "Bad Request", "message": "unknown field"}, "count": 3}


def recorded(name: str) -> dict[str, Any]:
    summaries: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "recorded_summaries.json").read_text())
    return summaries[name]


def test_a_report_has_a_row_of_aiperfs_figures_per_run() -> None:
    summaries = [excerpt(recorded("chat")), excerpt(recorded("cancel"))]
    text = report((RUN, WITH_CANCELLATIONS), summaries, {"date": "2026-11-23"}, threads=1)
    head, _, *rows = [line for line in text.splitlines() if line.startswith("|")]
    assert head == f"| endpoint | {' | '.join(COLUMNS)} |"
    assert rows == [
        "| chat, 16 at once | 64 | 238.0 | 516.8 | 24.6 | 27.3 | 1,819.1 | 2,172.8 | 569 | 8.9 | 6 | 0 | 0 |",
        "| chat, some cancelled, 16 at once | 64 | 129.4 | 207.0 | 43.4 | 52.3 | 2,925.4 | 3,412.7 | 356 | 5.6 | 91 "
        "| 19 | 0 |",
    ]
    assert "- date: 2026-11-23\n" in text
    assert "`--threads 1`" in text


def test_a_figure_that_aiperf_does_not_tell_is_a_dash() -> None:
    summary = recorded("chat")
    del summary["overall_usage_prompt_cache_read_pct"]
    assert "| 8.9 | — | 0 | 0 |" in report((RUN,), [summary], {}, threads=1)


def test_recorded_runs_have_no_faults() -> None:
    assert faults(RUN, recorded("chat")) == []
    assert faults(WITH_CANCELLATIONS, recorded("cancel")) == []


def with_errors(summary: dict[str, Any]) -> None:
    summary["error_summary"].append(BAD_REQUEST)
    summary["error_request_count"] = {"avg": 3.0}
    summary["usage_completion_tokens"]["count"] -= 3


def without_usage(summary: dict[str, Any]) -> None:
    summary["usage_completion_tokens"]["count"] -= 1


def with_a_short_answer(summary: dict[str, Any]) -> None:
    summary["usage_completion_tokens"]["min"] = 63.0


def with_fewer_requests(summary: dict[str, Any]) -> None:
    summary["completed_request_count"]["avg"] -= 1


def stopped(summary: dict[str, Any]) -> None:
    summary["was_cancelled"] = True


def incomplete(summary: dict[str, Any]) -> None:
    summary["is_complete"] = False


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (with_errors, f"error: {BAD_REQUEST}"),
        (without_usage, "63 of 64 answers have a usage"),
        (with_a_short_answer, "answers have 63 to 64 tokens instead of 64"),
        (with_fewer_requests, "63 requests instead of 64"),
        (stopped, "aiperf did not complete"),
        (incomplete, "aiperf did not complete"),
    ],
)
def test_what_is_wrong_in_a_summary_is_told(damage: Callable[[dict[str, Any]], None], fault: str) -> None:
    summary = recorded("chat")
    damage(summary)
    assert faults(RUN, excerpt(summary)) == [fault]


def test_cancellations_that_were_not_planned_are_faults_and_planned_ones_that_are_missing_too() -> None:
    assert faults(RUN, recorded("cancel")) == ["19 requests were cancelled"]
    assert faults(WITH_CANCELLATIONS, recorded("chat")) == ["0 requests were cancelled"]


def test_failed_requests_are_counted_apart_from_cancelled_ones() -> None:
    summary = recorded("cancel")
    summary["error_summary"].append(BAD_REQUEST)
    summary["error_request_count"]["avg"] += 3
    assert cancelled_and_errors(summary) == (19, 3)


def test_without_usage_an_answer_may_be_two_tokens_shorter_by_its_text() -> None:
    by_text, summary = replace(RUN, counts_usage=False), recorded("chat")
    del summary["usage_completion_tokens"]
    summary["output_sequence_length"]["min"] = 62.0
    assert faults(by_text, summary) == []
    summary["output_sequence_length"]["min"] = 61.0
    assert faults(by_text, summary) == ["answers have 61 to 64 tokens instead of 64"]


def test_a_short_trial_has_whole_conversations_and_a_request_for_each_in_flight() -> None:
    for run in RUNS:
        short = run.shortened(0.01)
        assert run.at_once <= short.requests < run.requests
        assert short.requests % short.turns == 0
    (turns,) = [run for run in RUNS if run.turns == TURNS]
    arguments = turns.shortened(0.3).arguments("http://127.0.0.1:1", "a/b", 7, "/artifacts")
    assert "--conversation-num=9" in arguments  # 38 requests are 9 conversations of 4 turns, and a rest
    assert "--random-seed=7" in arguments
