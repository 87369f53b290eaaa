"""What a mixture of experts chooses by, as data: specs of models have it, so it needs no torch."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """How a model chooses.

    gpt-oss takes the softmax of the chosen logits, which is the softmax of all logits, renormalized.
    """

    num_experts: int
    top_k: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    renormalized: bool = False  # whether the scores of the chosen experts are divided by their sum
    scale: float = 1.0  # of the shares
    num_groups: int = 1  # of neighbouring experts; the chosen ones are from `top_groups` of them
    top_groups: int = 1

    def used_share(self, num_tokens: float) -> float:
        """Returns the share of the experts that so many tokens use, on average, if each of them chooses evenly."""
        left: float = (1.0 - self.top_k / self.num_experts) ** num_tokens
        return 1.0 - left
