"""The record of steps in flight that an engine leaves when it dies."""

from trunkline_worker.link.channel import MAX_SEQUENCES, STEPS_UNDER_WAY, FlightRecorder


def pair() -> tuple[FlightRecorder, FlightRecorder]:
    """The recorders of the front and of the engine."""
    ours, file = FlightRecorder.create()
    with file:
        return ours, FlightRecorder.open(file.fileno())


def test_an_engine_that_never_launched_leaves_nothing() -> None:
    front, _ = pair()
    assert front.in_flight() == set()


def test_the_last_steps_are_on_record_and_no_earlier_ones() -> None:
    front, engine = pair()
    steps = [[1, 2, 3], [2, 3], [3, 1 << 63]]
    for step in steps:
        engine.launch(step)
    assert len(steps) > STEPS_UNDER_WAY
    assert front.in_flight() == {2, 3, 1 << 63}


def test_a_shorter_step_leaves_nothing_of_a_longer_one() -> None:
    front, engine = pair()
    for step in ([1, 2, 3, 4], [5, 6, 7, 8], [9], []):
        engine.launch(step)
    assert front.in_flight() == {9}


def test_a_step_with_more_sequences_than_fit_does_not_touch_its_neighbour() -> None:
    front, engine = pair()
    engine.launch(list(range(MAX_SEQUENCES + 5)))
    engine.launch([7 << 40])
    assert front.in_flight() == {*range(MAX_SEQUENCES), 7 << 40}
