"""A request that outgrows what it counts with says so, whoever computes it."""

from trunkline_router.quotas.reservation import OutputMeter, Reservation


def test_it_tells_once_when_there_are_more_tokens_than_it_was_asked_about() -> None:
    meter, told = OutputMeter(), list[int]()
    meter.add(3)
    meter.when_past(4, lambda: told.append(meter.tokens))
    meter.add(1)
    assert told == [], "not more"
    meter.add(2)
    meter.add(2)
    assert told == [6]
    meter.when_past(7, lambda: told.append(-1))
    assert told == [6, -1], "at once, where there are already"
    meter.when_past(20, lambda: told.append(-2))
    meter.when_past(30, lambda: told.append(-3))
    meter.add(13)
    assert told == [6, -1], "what was asked for before does not count any more"
    meter.add(10)
    assert told == [6, -1, -3]


def test_what_is_outgrown_before_anybody_is_followed_is_told_all_the_same() -> None:
    told: list[int] = []
    with Reservation(lambda reservation: None, lambda cost: None, 20, 10) as reservation:
        reservation.meter.when_past(10, lambda: told.append(reservation.output_tokens))
        reservation.meter.add(11)
        assert told == [11]
        assert reservation.used_tokens == 0, "nobody is known to have served it"
