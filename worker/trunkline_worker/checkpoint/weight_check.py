"""Finds NaN and infinity among weights while they are loaded."""

import torch
from torch import Tensor


class WeightCheck:
    """Looks at every tensor once, where it lies. On a GPU nothing waits for the answers until the end."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._finite: list[Tensor] = []

    def see(self, target: Tensor, name: str) -> None:
        """target: the tensor as it will be used"""
        if target.numel():
            # One pass without a temporary, unlike isfinite(); a NaN among the values is the least and the greatest.
            least, greatest = torch.aminmax(target)
            self._names.append(name)
            self._finite.append(least.isfinite() & greatest.isfinite())

    def broken(self) -> str | None:
        """The first tensor that was seen with a value that is not finite. Waits for the device."""
        if not self._finite:
            return None
        answers = zip(self._names, torch.stack(self._finite).tolist(), strict=True)
        return next((name for name, finite in answers if not finite), None)
