"""Decides, when a request begins, whether its trace is exported: as OTEL_TRACES_SAMPLER says.

https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/
"""

import os
from dataclasses import dataclass, field
from hashlib import blake2b
from secrets import token_bytes

SAMPLER, RATIO = "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG"
PARENT_BASED = "parentbased_"
ALWAYS_ON, ALWAYS_OFF, BY_RATIO = "always_on", "always_off", "traceidratio"
ROOTS = (ALWAYS_ON, ALWAYS_OFF, BY_RATIO)
DEFAULT = PARENT_BASED + ALWAYS_ON
_RATIO_BITS = 64  # the SDK compares so many bits of a trace id, so that processes of one ratio agree


class SamplerError(ValueError):
    """A variable of the sampler is invalid. The message is one line for a person."""


@dataclass(frozen=True, slots=True)
class HeadSampler:
    """ratio: share of the traces that are sampled. is_parent_based: a caller that has decided already is followed. key:
    secret, for the ids of callers that are not followed"""

    ratio: float = 1.0
    is_parent_based: bool = True
    key: bytes = field(default_factory=lambda: token_bytes(16), repr=False, compare=False)

    def samples(self, trace_id: int, parent: bool | None) -> bool:
        """Whether to sample a trace. `parent`: whether its caller does; None: it begins here.

        All requests of a trace are sampled, or none. A caller that is not followed has chosen the trace's id all the
        same, so its id decides in a way that callers cannot know.
        """
        if parent is not None and self.is_parent_based:
            return parent
        if self.ratio >= 1.0:
            return True
        drawn = trace_id & (1 << _RATIO_BITS) - 1 if parent is None else self._hidden(trace_id)
        return drawn < round(self.ratio * (1 << _RATIO_BITS))

    def _hidden(self, trace_id: int) -> int:
        hashed = blake2b(trace_id.to_bytes(16), digest_size=_RATIO_BITS // 8, key=self.key)
        return int.from_bytes(hashed.digest())


NONE_SAMPLED = HeadSampler(ratio=0.0)  # but for the traces of callers that sample them


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
