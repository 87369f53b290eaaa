"""The samples of a step and what its entries get by them."""

import numpy as np

from trunkline_worker.runner.batch_rows import Row
from trunkline_worker.runner.places import Places
from trunkline_worker.runner.sampler import NOT_FINITE
from trunkline_worker.step.plan import PositionLogprobs, Run, Sampling, SequenceStart, SequenceStep, StepPlan


def row(logprobs: int | None = None) -> Row:
    return Row(SequenceStart(1, [1, 2, 3, 4], 3, [0], Sampling(9, logprobs=logprobs)))


def plan_of(runs: dict[int, Run], masked: list[int] | None = None) -> StepPlan:
    """Four entries of sequences with four tokens: two that decode, one with a prompt, one in the middle of its own."""
    steps = [
        SequenceStep(n, 0, 4 - new, new + (runs[n].num_new if n in runs else 0), (), samples)
        for n, (new, samples) in enumerate(((1, True), (1, True), (3, True), (2, False)))
    ]
    return StepPlan(1, steps, runs=runs, masked=masked or [])


RUN = Run.of([20, 21, 22], 1)  # after four tokens: one forced, two drafts


def test_usual_entries_have_one_sample_each() -> None:
    plan, rows = plan_of({}), [row(), row(2), row(), row()]
    places = Places.of(plan, rows)
    assert places == Places([0, 1, 2])
    assert places.number(plan, np.array([0, 1, 4, 6], np.int32)).tolist() == [0, 1, 4]
    entry = PositionLogprobs(8, -1.0, 1, [])
    result = places.result(plan, [7, 8, None], {1: entry}, {2: NOT_FINITE})
    assert result.token_ids == [7, 8, None, None]
    assert (result.logprobs, result.errors) == ({1: [entry]}, {2: NOT_FINITE})


def test_a_run_has_a_sample_at_each_draft_and_one_after_them() -> None:
    plan = plan_of({0: RUN, 2: RUN})
    places = Places.of(plan, [row()] * 4)
    assert places.entries == [0, 0, 0, 1, 2, 2, 2]
    assert places.positions == [5, 6, 7, 4, 5, 6, 7]
    assert places.forced == {}
    assert places.number(plan, np.array([3, 4, 10, 12], np.int32)).tolist() == [1, 2, 3, 4, 8, 9, 10]
    result = places.result(plan, [21, 22, 5, 6, 21, 9, 7], {}, {})
    assert result.token_ids == [None, 6, None, None]
    assert result.runs == {0: [20, 21, 22, 5], 2: [20, 21, 9]}


def test_forced_tokens_have_samples_where_log_probabilities_are_requested() -> None:
    forced = Run([20, 21, 22], 3, 2)  # the last one is not computed
    plan = plan_of({0: RUN, 1: forced})
    rows = [row(0), row(0), row(), row()]
    places = Places.of(plan, rows)
    assert places.entries == [0, 0, 0, 0, 1, 1, 1, 2]
    assert places.positions == [4, 5, 6, 7, 4, 5, 6, 4]
    assert places.forced == {0: 20, 4: 20, 5: 21, 6: 22}
    found = {i: PositionLogprobs(i, -1.0, 1, []) for i in range(7)}
    result = places.result(plan, [20, 9, 22, 5, 20, 21, 22, 6], found, {})
    assert result.runs == {0: [20, 9], 1: [20, 21, 22]}
    assert result.logprobs == {0: [found[0], found[1]], 1: [found[4], found[5], found[6]]}
    rows[1] = row()
    places = Places.of(plan, rows)
    assert places.entries == [0, 0, 0, 0, 2], "nothing is sampled at forced tokens"
    assert places.result(plan, [20, 21, 22, 5, 6], {}, {}).runs == {0: [20, 21, 22, 5], 1: [20, 21, 22]}


def test_an_error_after_a_draft_that_was_not_taken_is_of_no_account() -> None:
    plan = plan_of({0: RUN})
    places = Places.of(plan, [row()] * 4)
    result = places.result(plan, [9, None, None, 6, 7], {}, {1: NOT_FINITE, 2: NOT_FINITE})
    assert (result.runs, result.errors) == ({0: [20, 9]}, {})
    result = places.result(plan, [21, None, 5, 6, 7], {}, {1: NOT_FINITE})
    assert (result.runs, result.errors) == ({}, {0: NOT_FINITE})
    assert result.token_ids == [None, 6, 7, None]


def test_an_entry_without_its_mask_gets_nothing_even_of_a_run() -> None:
    plan = plan_of({0: RUN, 2: RUN}, masked=[0, 2])
    places = Places.of(plan, [row(), row(), row(1), row()], late={0})
    assert places.entries == [1, 2, 2, 2, 2]
    words = np.arange(3, dtype=np.int32)[:, None]
    assert {i: mask.tolist() for i, mask in places.masks({2: words}).items()} == {2: [0], 3: [1], 4: [2]}
    assert places.result(plan, [6, 20, 21, 22, 8], {}, {}).runs == {2: [20, 21, 22, 8]}
