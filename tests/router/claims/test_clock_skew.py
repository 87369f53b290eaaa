"""The difference between a worker's clock and the router's, from what a choice's timeline says."""

from math import nan

import pytest

from trunkline.v1.worker_pb2 import Timeline
from trunkline_router.workers.output_claims import clock_skew_s

SENT_UNIX_S = 1_800_000_000.0


def told(received_unix_s: float, ended_s: float = 1.0) -> Timeline:
    timeline = Timeline(ended_s=ended_s)
    timeline.received.FromNanoseconds(int(received_unix_s * 1e9))
    return timeline


@pytest.mark.parametrize("skew_s", [-30.0, 0.0, 0.25, 7200.0])
def test_it_is_told_within_half_of_the_time_on_the_way(skew_s: float) -> None:
    to_worker_s, back_s = 0.002, 0.006
    found = clock_skew_s(told(SENT_UNIX_S + to_worker_s + skew_s), SENT_UNIX_S, to_worker_s + 1.0 + back_s)
    assert found == pytest.approx(skew_s, abs=(to_worker_s + back_s) / 2)


@pytest.mark.parametrize(
    "timeline",
    [
        Timeline(ended_s=1.0),
        told(SENT_UNIX_S, ended_s=nan),
        told(SENT_UNIX_S, ended_s=-1.0),  # it would have been under way for longer than the attempt lasted
        told(SENT_UNIX_S, ended_s=2.0),
        told(SENT_UNIX_S, ended_s=0.0),  # under way for more than a second
    ],
)
def test_a_timeline_that_cannot_be_exact_tells_nothing(timeline: Timeline) -> None:
    assert clock_skew_s(timeline, SENT_UNIX_S, 1.1) is None
