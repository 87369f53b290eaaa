"""How many tokens each expert of each layer gets. Traffic unlike a model's training data may use few of its experts."""

import torch
from torch import Tensor

from trunkline_worker.model.architectures.decoder_spec import DecoderSpec

# Tokens that are looked at together, so that few tokens do not look uneven: of 256 experts, of which each token uses 8,
# an expert then has 256. If tokens choose at random, the busiest one has a fifth more.
WINDOW_TOKENS = 8192


class ExpertLoads:
    """Loads of the present window. A decoder adds to them with each step; its runner ends windows."""

    def __init__(self, spec: DecoderSpec, device: torch.device) -> None:
        rule = spec.routing
        # [num_layers, num_experts]; rows of layers without experts stay 0
        self.counts = torch.zeros(spec.num_layers, rule.num_experts if rule else 0, dtype=torch.int64, device=device)
        self._top_k = rule.top_k if rule else 0
        self._num_tokens = 0  # of this window

    def after_step(self, num_tokens: int) -> Tensor | None:
        """Returns the loads of the window that a step of so many tokens ends, like `counts` and on its device, and
        begins a window. Returns None if no window ends. A layer that did not compute all tokens has no loads: the last
        one on a GPU computes those that are sampled, which are too few to tell."""
        self._num_tokens += num_tokens
        if self._num_tokens < WINDOW_TOKENS or not self.counts.numel():
            return None
        is_whole = self.counts.sum(dim=1, keepdim=True) == self._num_tokens * self._top_k
        loads = torch.where(is_whole, self.counts, 0)
        self.clear()
        return loads

    @torch.inference_mode()
    def clear(self) -> None:
        """Begins a window. What was counted is dropped."""
        self.counts.zero_()
        self._num_tokens = 0


def imbalance(loads: Tensor) -> tuple[float, ...]:
    """Returns the tokens of each layer's busiest expert over the mean of its experts; 0 where there are none.

    loads: [num_layers, num_experts] on the host
    """
    return tuple(torch.nan_to_num(loads.amax(dim=1) / loads.double().mean(dim=1)).tolist())
