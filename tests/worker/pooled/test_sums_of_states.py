"""The states of a prompt are added up in an order that the prompt alone decides: no chunks, device or run do."""

import pytest
import torch

from trunkline_worker.model.pooling.pooling_head import SUM_BLOCK, PoolingHead
from trunkline_worker.model.pooling.pooling_spec import Pooling

HIDDEN = 3


def states_of(num_tokens: int) -> torch.Tensor:
    """Values of so many magnitudes that each order has another sum."""
    draw = torch.Generator().manual_seed(num_tokens)
    exponents = torch.rand(num_tokens, HIDDEN, generator=draw) * 40 - 20
    return torch.randn(num_tokens, HIDDEN, generator=draw) * 10**exponents


def added(values: list[float]) -> float:
    """The sum of a block: of one half, and the other added to it."""
    if len(values) == 1:
        return values[0]
    half = len(values) // 2
    return added([low + high for low, high in zip(values[:half], values[half:], strict=True)])


def total(values: list[float]) -> float:
    """The sum of a component: block after block."""
    found = 0.0
    for start in range(0, len(values), SUM_BLOCK):
        block = values[start : start + SUM_BLOCK]
        found += added(block + [0.0] * (SUM_BLOCK - len(block)))
    return found


@pytest.mark.parametrize("num_tokens", [1, SUM_BLOCK - 1, SUM_BLOCK, SUM_BLOCK + 1, 7 * SUM_BLOCK + 5])
@pytest.mark.parametrize("most", [1, 5, SUM_BLOCK, 3 * SUM_BLOCK + 2, 1000])
@pytest.mark.parametrize("pooling", [Pooling.MEAN, Pooling.MEAN_SQRT_LEN])
def test_a_sum_has_one_order_whatever_the_chunks(num_tokens: int, most: int, pooling: Pooling) -> None:
    head, states, pooled = PoolingHead(pooling, ()), states_of(num_tokens), None
    for chunk in torch.split(states, most):
        pooled = head.add(pooled, chunk)
        assert len(pooled) <= SUM_BLOCK, "what is kept of a prompt does not grow with it"
    assert pooled is not None
    divisor = num_tokens if pooling is Pooling.MEAN else num_tokens**0.5
    sums = torch.tensor([total(column) for column in states.T.double().tolist()], dtype=torch.float64)
    assert head.values(pooled, num_tokens) == (sums / divisor).float().tolist()
