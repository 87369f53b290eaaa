"""What a front makes of the values of a prompt."""

import math

import numpy as np
import pytest

from trunkline.v1.worker_pb2 import PoolingActivation, Work
from trunkline_worker.front.text.whole_output import finished

NONE, NORMALIZE = PoolingActivation.POOLING_ACTIVATION_NONE, PoolingActivation.POOLING_ACTIVATION_NORMALIZE
SIGMOID, SOFTMAX = PoolingActivation.POOLING_ACTIVATION_SIGMOID, PoolingActivation.POOLING_ACTIVATION_SOFTMAX
EXTREMES = [0.0, 3.0e38, -3.0e38, 1e-30, 88.0, -110.0]


def test_a_vector_is_cut_before_it_is_normalised() -> None:
    assert finished([3.0, 4.0, 12.0], Work(dimensions=2), NORMALIZE).tolist() == pytest.approx([0.6, 0.8])
    assert finished([3.0, 4.0, 12.0], Work(), NORMALIZE).tolist() == pytest.approx([3 / 13, 4 / 13, 12 / 13])
    assert finished([3.0, 4.0, 12.0], Work(dimensions=2, raw=True), NORMALIZE).tolist() == [3.0, 4.0]


def test_a_vector_without_a_direction_stays_as_it_is() -> None:
    assert finished([0.0, 0.0], Work(), NORMALIZE).tolist() == [0.0, 0.0]


def test_scores_are_probabilities_unless_raw_ones_are_asked_for() -> None:
    assert finished([0.0, 2.0], Work(), SIGMOID).tolist() == pytest.approx([0.5, 1 / (1 + math.exp(-2))])
    assert finished([0.0, 2.0], Work(), SOFTMAX).tolist() == pytest.approx([1 / (1 + math.e**2), 1 / (1 + math.e**-2)])
    for activation in (NONE, SIGMOID, SOFTMAX):
        assert finished([0.0, 2.0], Work(raw=True), activation).tolist() == [0.0, 2.0]


@pytest.mark.parametrize("activation", [NONE, NORMALIZE, SIGMOID, SOFTMAX])
def test_the_largest_and_the_smallest_values_overflow_nothing(activation: "PoolingActivation.ValueType") -> None:
    for values in (EXTREMES, EXTREMES[1:2], EXTREMES[2:3], EXTREMES[3:4]):
        found = finished(values, Work(), activation)
        assert found.dtype == np.float32
        assert np.isfinite(found).all()
        if activation in (SIGMOID, SOFTMAX):
            assert ((found >= 0) & (found <= 1)).all()
