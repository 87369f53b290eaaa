"""When the client sends a call again: the delays, without waiting for them."""

import math
from random import Random

import pytest

from trunkline.client.retries import FIRST_DELAY_S, MOST_DELAY_S, MOST_JITTER, Tries
from trunkline.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NotAllowed,
    NoWorker,
    Overloaded,
    TrunklineError,
)


class NoJitter(Random):
    def uniform(self, a: float, b: float) -> float:
        return a


def refused(retry_after_s: float | None = 1.0) -> TrunklineError:
    return Overloaded("full", reason="OVERLOADED", retry_after_s=retry_after_s)


def tries(retries: int = 9, deadline_s: float | None = None) -> Tries:
    return Tries(retries, deadline_s, NoJitter())


def test_the_servers_delay_doubles_with_each_failure_up_to_a_bound() -> None:
    made = tries()
    delays_s = [made.delay_s(refused(1.5), 0.0) for _ in range(6)]
    assert delays_s == [1.5, 3.0, 6.0, 12.0, 24.0, MOST_DELAY_S]


def test_a_call_is_sent_again_only_as_often_as_allowed() -> None:
    made = tries(2)
    assert [made.delay_s(refused(), 0.0) for _ in range(4)] == [1.0, 2.0, None, None]
    assert tries(0).delay_s(refused(), 0.0) is None


def test_jitter_only_ever_lengthens_a_delay() -> None:
    rng = Random(1)
    delays_s = [Tries(1, None, rng).delay_s(refused(2.0), 0.0) or math.nan for _ in range(1000)]
    assert 2.0 <= min(delays_s) < 2.01
    assert 2.0 * (1 + MOST_JITTER) - 0.01 < max(delays_s) <= 2.0 * (1 + MOST_JITTER)


def test_a_delay_that_would_pass_the_deadline_is_not_waited_for() -> None:
    assert tries(deadline_s=101.1).delay_s(refused(1.0), 100.0) == 1.0
    assert tries(deadline_s=101.0).delay_s(refused(1.0), 100.0) is None
    grows = tries(deadline_s=102.5)
    assert grows.delay_s(refused(1.0), 100.0) == 1.0
    assert grows.delay_s(refused(1.0), 101.0) is None, "the second delay is two seconds"


def test_a_long_delay_is_the_callers_to_wait_for() -> None:
    assert tries().delay_s(refused(MOST_DELAY_S), 0.0) == MOST_DELAY_S
    assert tries().delay_s(refused(MOST_DELAY_S + 0.1), 0.0) is None


def test_a_connection_that_failed_is_tried_again_soon() -> None:
    made = tries()
    assert [made.delay_s(NoWorker("no connection"), 0.0) for _ in range(2)] == [FIRST_DELAY_S, 2 * FIRST_DELAY_S]


@pytest.mark.parametrize(
    "error",
    [
        refused(None),
        NoWorker("draining", reason="NO_WORKER"),
        InvalidRequest("bad", reason="INVALID_REQUEST"),
        InternalError("bug", retry_after_s=1.0),
        NotAllowed("no"),
        DeadlineExceeded("late"),
        TrunklineError("the client was closed"),
    ],
    ids=lambda error: type(error).__name__ + error.reason,
)
def test_what_a_retry_would_not_change_is_final(error: TrunklineError) -> None:
    assert tries().delay_s(error, 0.0) is None
