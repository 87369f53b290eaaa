"""Finds NaN and infinite values in weights while they are loaded."""

import torch
from torch import Tensor


class WeightCheck:
    """Checks each tensor once, on its device. On a GPU, nothing waits for the results until broken() is called."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._finite: list[Tensor] = []

    def see(self, target: Tensor, name: str) -> None:
        """Checks a tensor in its final form. target: on its device, in its final dtype"""
        if target.numel():
            # One pass without a temporary tensor, unlike isfinite(); aminmax() returns NaN twice if a value is NaN.
            least, greatest = torch.aminmax(target)
            self._names.append(name)
            self._finite.append(least.isfinite() & greatest.isfinite())

    def broken(self) -> str | None:
        """Returns the name of the first tensor with a non-finite value, or None. Waits for the device."""
        if not self._finite:
            return None
        answers = zip(self._names, torch.stack(self._finite).tolist(), strict=True)
        return next((name for name, finite in answers if not finite), None)
