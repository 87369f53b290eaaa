"""When calls that are not read end. That they end is tested with gRPC, in router/watch/test_watch_fleet.py."""

from random import Random

from trunkline_runtime.unread_streams import SPREAD, UNREAD_S, spread_s

WATCHERS = 64  # as many as a router has
TURN_S = 0.1


def test_calls_that_stop_reading_at_once_do_not_end_at_once() -> None:
    rng = Random(0)
    ends_s = [spread_s(UNREAD_S, rng.random()) for _ in range(WATCHERS)]
    assert all(UNREAD_S <= end_s <= UNREAD_S * (1 + SPREAD) for end_s in ends_s)
    assert max(sum(start_s <= end_s < start_s + TURN_S for end_s in ends_s) for start_s in ends_s) <= 5
