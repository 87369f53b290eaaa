"""Decides, when a request begins, whether its trace is exported: as OTEL_TRACES_SAMPLER says.

https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/
"""

import os
from dataclasses import dataclass
from random import Random

SAMPLER, RATIO = "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG"
PARENT_BASED = "parentbased_"
ALWAYS_ON, ALWAYS_OFF, BY_RATIO = "always_on", "always_off", "traceidratio"
ROOTS = (ALWAYS_ON, ALWAYS_OFF, BY_RATIO)
DEFAULT = PARENT_BASED + ALWAYS_ON
_RATIO_BITS = 64  # the SDK compares so many bits of a trace id, so that processes of one ratio agree
_RANDOM = Random()


class SamplerError(ValueError):
    """A variable of the sampler is invalid. The message is one line for a person."""


@dataclass(frozen=True, slots=True)
class HeadSampler:
    """ratio: share of the traces that are sampled. is_parent_based: a caller that has decided already is followed."""

    ratio: float = 1.0
    is_parent_based: bool = True

    def samples(self, trace_id: int, parent: bool | None) -> bool:
        """Whether to sample a trace. `parent`: whether its caller does; None: it begins here.

        A caller that is not followed has chosen the trace's id all the same, so its id does not decide.
        """
        if parent is not None and self.is_parent_based:
            return parent
        if self.ratio >= 1.0:
            return True
        drawn = trace_id & (1 << _RATIO_BITS) - 1 if parent is None else _RANDOM.getrandbits(_RATIO_BITS)
        return drawn < round(self.ratio * (1 << _RATIO_BITS))


def head_sampler() -> HeadSampler:
    """The sampler that the variables ask for. Raises SamplerError."""
    name = os.environ.get(SAMPLER) or DEFAULT
    root = name.removeprefix(PARENT_BASED)
    if root not in ROOTS:
        allowed = ", ".join((*ROOTS, *(PARENT_BASED + each for each in ROOTS)))
        raise SamplerError(f"{SAMPLER}={name} is not supported; allowed: {allowed}")
    ratio = {ALWAYS_ON: 1.0, ALWAYS_OFF: 0.0}.get(root)
    if ratio is None:
        given = os.environ.get(RATIO) or "1.0"
        try:
            ratio = float(given)
        except ValueError:
            ratio = -1.0
        if not 0.0 <= ratio <= 1.0:
            raise SamplerError(f"{RATIO}={given} is not a ratio; allowed: 0.0 to 1.0")
    return HeadSampler(ratio, is_parent_based=name != root)
