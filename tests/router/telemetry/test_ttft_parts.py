"""Where the time to first token went."""

import pytest

from trunkline.v1.worker_pb2 import PrefillChunk, Timeline
from trunkline_router.record.request_record import AttemptRecord, Interval, PlacementRecord, RequestRecord
from trunkline_router.record.ttft_parts import cause_of, causes_of, ttft_parts

START_S = 100.0


def record(*, first_token_s: float | None = 1.0, ended_s: float = 2.0) -> RequestRecord:
    """A request that was tokenized for 10 ms, waited 20 ms for its quota, and was placed at once."""
    made = RequestRecord("r", START_S, 0)
    made.tokenized = Interval(START_S + 0.01, START_S + 0.02)
    made.admitted = Interval(START_S + 0.02, START_S + 0.04)
    made.placements = [PlacementRecord(Interval(START_S + 0.04, START_S + 0.05), None)]
    made.placements[0].worker = "w"
    made.first_token_s = None if first_token_s is None else START_S + first_token_s
    made.ended_s = START_S + ended_s
    return made


def attempt(start_s: float, first_s: float | None, end_s: float, *timelines: Timeline, **fields: str) -> AttemptRecord:
    made = AttemptRecord("w", START_S + start_s)
    made.first_output_s = None if first_s is None else START_S + first_s
    made.ended_s = START_S + end_s
    made.timelines = list(timelines)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def chunk(started_s: float, duration_s: float, tokens: int, others: int) -> PrefillChunk:
    return PrefillChunk(
        started_s=started_s,
        duration_s=duration_s,
        tokens=tokens,
        step_prefill_tokens=tokens,
        step_decode_tokens=others,
    )


def parts(made: RequestRecord) -> dict[str, float]:
    """Times in milliseconds by part; checks that they are in order and leave nothing out."""
    found = ttft_parts(made, made.ended_s or 0.0)
    at_s = 0.0
    for part in found:
        assert part.start_s == pytest.approx(at_s)
        assert part.duration_s > 0
        at_s = part.end_s
    end_s = made.first_token_s if made.first_token_s is not None else made.ended_s
    assert end_s is not None
    assert at_s == pytest.approx(end_s - made.started_s)
    times: dict[str, float] = {}
    for part in found:
        times[part.part] = times.get(part.part, 0.0) + round(1e3 * part.duration_s, 6)
    return {name: round(time_ms, 3) for name, time_ms in times.items()}


def cause(made: RequestRecord) -> str:
    return cause_of(made, made.ended_s or 0.0)


def waited_for(made: RequestRecord) -> str:
    cause, of_queue = causes_of(made, made.ended_s or 0.0)
    assert cause == cause_of(made, made.ended_s or 0.0)
    return of_queue


def test_each_stage_has_its_part_and_the_rest_is_the_network() -> None:
    made = record()
    timeline = Timeline(
        admitted_s=0.4, first_token_s=0.9, ended_s=1.5, chunks=[chunk(0.4, 0.2, 300, 100), chunk(0.7, 0.2, 100, 100)]
    )
    made.attempts = [attempt(0.05, 1.0, 2.0, timeline)]
    assert parts(made) == {
        "network": 60.0,  # 10 ms before the tokenizer, 50 ms on the way back
        "tokenizer": 10.0,
        "admission": 20.0,
        "placement": 10.0,
        "queue": 400.0,
        "prefill": 250.0,  # 3/4 of one step and half of the other
        "decode_interference": 250.0,  # the others' parts of both, and 100 ms between them
    }
    assert cause(made) == "queue"


def test_a_preempted_prompt_lacked_kv_and_so_did_one_that_was_expected_to_wait_for_it() -> None:
    timeline = Timeline(
        admitted_s=0.05, first_token_s=0.9, ended_s=1.5, preemptions=1, recomputed_tokens=300, chunks=[
            chunk(0.05, 0.1, 300, 0), chunk(0.8, 0.1, 300, 0),
        ],
    )  # fmt: skip
    made = record()
    made.attempts = [attempt(0.05, 1.0, 2.0, timeline)]
    assert parts(made)["kv_pressure"] == 650.0
    assert cause(made) == "kv_pressure"
    waited = Timeline(admitted_s=0.8, first_token_s=0.9, ended_s=1.5, chunks=[chunk(0.8, 0.1, 300, 0)])
    made.attempts = [attempt(0.05, 1.0, 2.0, waited)]
    assert parts(made)["queue"] == 800.0
    assert (cause(made), waited_for(made)) == ("queue", "queue")
    made.placements[0].waits_for_kv = True
    assert parts(made)["kv_pressure"] == 800.0
    assert (cause(made), waited_for(made)) == ("kv_pressure", "kv_pressure")


def test_a_short_wait_in_a_worker_has_no_cause() -> None:
    made = record()
    timeline = Timeline(admitted_s=0.0004, first_token_s=0.9, ended_s=1.5, chunks=[chunk(0.1, 0.8, 300, 0)])
    made.attempts = [attempt(0.05, 1.0, 2.0, timeline)]
    assert (cause(made), waited_for(made)) == ("prefill", "")


def test_workers_that_were_lost_before_the_first_token_are_the_cause() -> None:
    made = record()
    made.placements.append(PlacementRecord(Interval(START_S + 0.85, START_S + 0.86), None))
    timeline = Timeline(admitted_s=0.01, first_token_s=0.1, ended_s=0.5, chunks=[chunk(0.01, 0.09, 9, 0)])
    made.attempts = [
        attempt(0.05, None, 0.85, problem="lost", ended="NO_WORKER"),
        attempt(0.86, 1.0, 2.0, timeline),
    ]
    assert parts(made)["failover"] == 800.0
    assert cause(made) == "failover"


def test_a_request_without_a_first_token_is_explained_to_its_end() -> None:
    made = record(first_token_s=None, ended_s=0.5)
    made.attempts = [attempt(0.05, None, 0.5)]
    assert parts(made)["worker"] == 450.0
    made.attempts = []
    made.placements = [PlacementRecord(Interval(START_S + 0.04, START_S + 0.5), None)]
    assert parts(made)["placement"] == 460.0
    assert cause(made) == "placement", "no worker came"


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"ended": "complete"}, "w: the worker sent none"),
        ({"ended": "cancelled"}, "w: the request was ended there, and the worker did not answer within a second"),
        ({"ended": "granted"}, "w: it answers the client directly"),
        (
            {"ended": "NO_WORKER", "problem": "lost"},
            "w: the worker was lost later (NO_WORKER), before it told what it had done",
        ),
        ({"ended_s": None}, "w: the request still runs there"),
    ],
)
def test_a_worker_without_a_timeline_says_why_there_is_none(fields: dict[str, str], why: str) -> None:
    made = record()
    made.attempts = [attempt(0.05, 1.0, 2.0, **fields)]
    assert ttft_parts(made, 2.0 + START_S)[-1].note == why


def test_a_client_that_did_not_read_is_the_cause_of_a_slow_answer() -> None:
    made = record(first_token_s=0.06)
    made.stalled_s = 1.5
    assert cause(made) == "stalled_client"


def test_a_fast_request_has_no_cause() -> None:
    made = RequestRecord("r", START_S, 0)
    made.first_token_s, made.ended_s = START_S + 0.0005, START_S + 0.001
    assert cause(made) == ""
