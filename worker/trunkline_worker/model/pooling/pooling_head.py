"""Computes the output of a prompt from its hidden states, which may come in several chunks. In float32."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, pad, relu

from trunkline_worker.model.pooling.pooling_spec import Pooling

SUM_BLOCK = 32  # tokens, a power of two: states are added up block by block
FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "gelu": gelu,
    "relu": relu,
}


@dataclass(frozen=True, slots=True)
class Projection:
    """The weights of a ProjectionSpec, in float32. Absent ones are None."""

    weight: Tensor  # [out, in]
    bias: Tensor | None  # [out]
    activation: str
    norm: tuple[Tensor, Tensor | None] | None  # weight and bias [out]
    norm_eps: float

    def of(self, x: Tensor) -> Tensor:
        """[in] → [out]"""
        x = FUNCTIONS[self.activation](linear(x, self.weight, self.bias))
        return x if self.norm is None else layer_norm(x, x.shape, *self.norm, self.norm_eps)


@dataclass(frozen=True, slots=True)
class PoolingHead:
    """Pools states, and projects the result. One prompt is computed at a time, so it does not depend on others."""

    pooling: Pooling
    projections: tuple[Projection, ...]

    @property
    def needs_every_state(self) -> bool:
        """Whether the states of all tokens must be computed, so that no prefix may come from the cache."""
        return self.pooling is not Pooling.LAST

    def add(self, pooled: Tensor | None, states: Tensor) -> Tensor:
        """Returns what is known of a prompt after a further chunk.

        pooled: what was known before it; None: nothing
        states: [num_tokens, hidden], after the final norm → [hidden] in float32; for sums [1 + num_tokens, hidden] in
            float64: the sum of the prompt's whole blocks, and the states that follow them
        """
        if self.pooling is Pooling.LAST:
            return states[-1].float()
        if self.pooling is Pooling.CLS:
            return states[0].float() if pooled is None else pooled
        if self.pooling is Pooling.MAX:
            highest = states.float().amax(0)
            return highest if pooled is None else torch.maximum(pooled, highest)
        states = states.double()
        if pooled is None:
            pooled = torch.zeros_like(states[:1])
        total, states = pooled[0], torch.cat((pooled[1:], states))
        in_blocks = len(states) // SUM_BLOCK * SUM_BLOCK
        for block in _block_sums(states[:in_blocks]) if in_blocks else ():
            total = total + block
        return torch.cat((total[None], states[in_blocks:]))

    def values(self, pooled: Tensor, num_tokens: int) -> list[float]:
        """Returns the output of a prompt whose chunks have all been added, before the last activation."""
        if self.pooling in (Pooling.MEAN, Pooling.MEAN_SQRT_LEN):
            last_block = pad(pooled[1:], (0, 0, 0, SUM_BLOCK + 1 - len(pooled)))
            pooled = pooled[0] + _block_sums(last_block)[0]
            pooled = pooled / (num_tokens if self.pooling is Pooling.MEAN else num_tokens**0.5)
        values: list[float] = self.projected(pooled.float()).tolist()
        return values

    def projected(self, pooled: Tensor) -> Tensor:
        """[hidden] float32 → [size of the output]"""
        for projection in self.projections:
            pooled = projection.of(pooled)
        return pooled


def _block_sums(states: Tensor) -> Tensor:
    """[num_blocks * SUM_BLOCK, hidden] → [num_blocks, hidden]

    The upper half of each block is added to the lower one, until one state is left. Sums of PyTorch would add in an
    order that depends on the device, and on a GPU on the run.
    """
    blocks = states.view(-1, SUM_BLOCK, states.shape[-1])
    while blocks.shape[1] > 1:
        lower, upper = blocks.chunk(2, dim=1)
        blocks = lower + upper
    return blocks[:, 0]
