"""Finds NaN and infinite values in weights while they are loaded."""

import torch
from torch import Tensor

NAN = {torch.float8_e4m3fn: 0x7F, torch.float8_e8m0fnu: 0xFF}  # these types have no infinity


class WeightCheck:
    """Checks each tensor once, on its device. On a GPU, nothing waits for the results until broken() is called."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._finite: list[Tensor] = []

    def see(self, target: Tensor, name: str) -> None:
        """Checks a tensor in its final form; integers need no check. target: on its device, in its final dtype"""
        if not target.numel() or not target.is_floating_point():
            return
        self._names.append(name)
        if target.itemsize == 1:  # aminmax() does not take 8-bit floats; all their bits but the sign say that it is NaN
            self._finite.append((target.view(torch.uint8) & NAN[target.dtype]).amax() < NAN[target.dtype])
            return
        # One pass without a temporary tensor, unlike isfinite(); aminmax() returns NaN twice if a value is NaN.
        least, greatest = torch.aminmax(target)
        self._finite.append(least.isfinite() & greatest.isfinite())

    def broken(self) -> str | None:
        """Returns the name of the first tensor with a non-finite value, or None. Waits for the device."""
        if not self._finite:
            return None
        answers = zip(self._names, torch.stack(self._finite).tolist(), strict=True)
        return next((name for name, finite in answers if not finite), None)
