"""Reports of `make bench-pooling`."""

import numpy as np

from trunkline_bench.pooling.against_sentence_transformers import INFINITY, OURS, report_name, rows
from trunkline_bench.pooling.sides import Run


def test_reports_of_one_day_do_not_replace_each_other() -> None:
    compared = [
        (["minilm"], ["given"]),
        (["minilm"], ["sorted"]),
        (["qwen3"], ["sorted"]),
        (["minilm", "qwen3"], ["given"]),
    ]
    assert len({report_name(models, others, "2026-11-28") for models, others in compared}) == len(compared)


def test_a_side_that_does_not_tell_its_padding_is_not_said_to_have_none() -> None:
    vectors = np.zeros((1, 2), np.float32)
    runs = {OURS: [Run(1.0, vectors, 0.0)], "given": [Run(2.0, vectors, 0.5)], INFINITY: [Run(4.0, vectors, None)]}
    found = rows("model", runs)
    assert [cells[-1] for cells in found.values()] == ["0%, 50%", "0%, not reported"]
    assert [cells[2] for cells in found.values()] == ["2.00", "4.00"]


def test_goals_are_those_of_default_and_of_sorted_batches() -> None:
    sides = (OURS, "given", "default", "sorted", INFINITY)
    found = rows("model", {side: [Run(1.0, np.zeros((1, 2), np.float32), 0.0)] for side in sides})
    assert [cells[-2] for cells in found.values()] == ["—", "2.5", "1.2", "—"]
