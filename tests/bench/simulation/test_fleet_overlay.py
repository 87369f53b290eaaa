"""Overlaid copies of a trace keep the gaps between turns and have prompts of their own."""

from collections import defaultdict
from functools import partial
from itertools import pairwise

import pytest

from trunkline_bench.simulation.costs.device_profile import PROFILES
from trunkline_bench.simulation.fleet import capacity
from trunkline_bench.simulation.fleet.overlay import MOST_COPIES, TooManyCopies, lap_of, overlay
from trunkline_bench.simulation.traces.trace_request import TraceRequest
from trunkline_bench.simulation.worker.simulated_worker import WorkerSpec
from trunkline_worker.scheduler.limits import SchedulerLimits


def tokens(first: int, count: int) -> list[int]:
    return [3 + (first + number) % 1000 for number in range(count)]


# Five conversations of four turns, 1 s apart within one and 10 s between them.
TRACE = [
    TraceRequest(10.0 * number + turn, 20 + turn, 3, partial(tokens, 50 * number, 20 + turn), conversation=str(number))
    for number in range(5)
    for turn in range(4)
]


def by_conversation(requests: list[TraceRequest]) -> dict[str, list[TraceRequest]]:
    found = defaultdict(list)
    for request in requests:
        found[request.conversation].append(request)
    return found


def test_the_gaps_between_turns_stay() -> None:
    laid = overlay(TRACE, 7, 200.0)
    gaps = {
        round(later.arrival_s - earlier.arrival_s, 9)
        for turns in by_conversation(laid).values()
        for earlier, later in pairwise(turns)
    }
    assert gaps == {1.0}
    assert [request.arrival_s for request in laid] == sorted(request.arrival_s for request in laid)


def test_copies_share_no_prefix_but_turns_of_one_copy_do() -> None:
    laid = overlay(TRACE, 6, 150.0)
    begins = {name: {request.prompt()[0] for request in turns} for name, turns in by_conversation(laid).items()}
    assert all(len(of_one) == 1 for of_one in begins.values())
    copies = {(name.rpartition("/")[0], token) for name, of_one in begins.items() for token in of_one}
    owners = defaultdict(set)
    for copy, token in copies:
        owners[token].add(copy)
    assert all(len(of_token) == 1 for of_token in owners.values())


@pytest.mark.parametrize("copies", [1, 3, 8.5])
def test_load_is_the_requested_multiple_of_the_trace(copies: float) -> None:
    laps = 20
    laid = overlay(TRACE, copies, laps * lap_of(TRACE))
    assert len(laid) == pytest.approx(copies * laps * len(TRACE), rel=0.04)


def test_whole_conversations_are_left_out_and_a_higher_load_contains_a_lower_one() -> None:
    less, more = (by_conversation(overlay(TRACE, copies, 300.0)) for copies in (2.5, 2.8))
    whole = by_conversation(overlay(TRACE, 3, 300.0))
    assert set(less) < set(more) < set(whole)
    for name, turns in less.items():
        assert len(turns) == len(whole[name])


def test_load_ramps_up_copy_by_copy() -> None:
    laid = overlay(TRACE, 10, 200.0, ramp_s=100.0)
    counts = [sum(start <= request.arrival_s < start + 50 for request in laid) for start in (0, 50, 100, 150)]
    assert counts[0] < 0.5 * counts[2] < counts[1] < counts[2]
    assert counts[3] == pytest.approx(counts[2], rel=0.1)


def test_more_copies_than_there_are_tokens_for_are_refused() -> None:
    with pytest.raises(TooManyCopies, match="too many"):
        overlay(TRACE, MOST_COPIES, 10.0)


def test_capacity_grows_as_prompts_shrink() -> None:
    spec = WorkerSpec(PROFILES["h200-8b"], 2000, 16, SchedulerLimits(max_step_tokens=2048))

    def of(count: int) -> float:
        requests = [TraceRequest(0.0, count, 20, partial(tokens, number, count)) for number in range(100)]
        return capacity.requests_per_s(spec, requests)

    assert of(200) > 1.5 * of(2000)
