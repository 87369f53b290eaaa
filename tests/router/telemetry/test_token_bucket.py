"""A token bucket bounds what is taken, whatever its clock does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline_router.record.rate_limits import TokenBucket

PER_S, BURST = 2.0, 5.0


@given(moments=st.lists(st.floats(0.0, 100.0), min_size=1, max_size=100))
def test_no_more_is_taken_than_was_there_and_came_back(moments: list[float]) -> None:
    """Even if the moments come out of order."""
    bucket = TokenBucket(PER_S, BURST)
    taken = sum(bucket.takes(1.0, now_s) for now_s in moments)
    assert taken <= BURST + PER_S * max(moments) + 1e-6
    assert bucket.left(1000.0) == BURST, "and it fills up to its burst only"


def test_a_debt_is_waited_for_and_tokens_that_are_added_pay_for_it() -> None:
    bucket = TokenBucket(PER_S, BURST, now_s=10.0)
    assert bucket.wait_s(10.0) == 0.0
    bucket.charge(BURST + 4.0, 10.0)
    assert not bucket.takes(1.0, 10.0)
    wait_s = bucket.wait_s(10.0)
    assert wait_s == pytest.approx(2.0, abs=0.01)
    assert bucket.wait_s(10.0 + wait_s) == 0.0
    bucket.add(1.0)
    assert bucket.takes(1.0, 10.0 + wait_s)
