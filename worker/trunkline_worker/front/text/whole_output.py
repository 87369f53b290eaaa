"""The last steps from the values that an engine computes for a prompt to its vector or scores. In float32."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trunkline.v1.worker_pb2 import PoolingActivation, Work

MOST_LOGIT = 100.0  # of a sigmoid: past it, float32 knows nothing between it and 1, and its power would overflow


def finished(values: Sequence[float], work: Work, activation: "PoolingActivation.ValueType") -> NDArray[np.float32]:
    """Returns the output of a prompt: cut to the dimensions that the request asks for, then activated, unless it asks
    for raw values."""
    x: NDArray[np.float32] = np.array(values, np.float32)
    if work.dimensions:
        x = x[: work.dimensions]
    if work.raw:
        return x
    if activation == PoolingActivation.POOLING_ACTIVATION_NORMALIZE:
        length = np.sqrt(np.square(x, dtype=np.float64).sum())
        return x if length == 0 else (x / length).astype(np.float32)
    if activation == PoolingActivation.POOLING_ACTIVATION_SIGMOID:
        x = (1 / (1 + np.exp(-x.clip(-MOST_LOGIT, MOST_LOGIT).astype(np.float64)))).astype(np.float32)
    if activation == PoolingActivation.POOLING_ACTIVATION_SOFTMAX:
        powers = np.exp(x.astype(np.float64) - x.max())
        x = (powers / powers.sum()).astype(np.float32)
    return x
