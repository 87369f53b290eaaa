"""The limits of the scheduler."""

from dataclasses import dataclass
from enum import Enum


class Batching(Enum):
    """How sequences come together in batches. All but the first are baselines for measurements."""

    CONTINUOUS = "continuous"
    STATIC = "static"  # a fixed batch runs to its end, padded to its longest prompt and its longest output
    STATIC_UNPADDED = "static-unpadded"  # the same, but positions without a token are not computed
    DYNAMIC = "dynamic"  # a batch is what arrives within a time window; it runs to its end, unpadded


class AdmissionRule(Enum):
    """When the KV pool allows a sequence to join the running set."""

    PREDICTED = "predicted"  # when the forecast peak of the running set with it fits
    OPTIMISTIC = "optimistic"  # when its known tokens fit now


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """See EngineSettings for ranges and meanings."""

    max_step_tokens: int = 2048
    max_running_requests: int = 256
    max_waiting_requests: int = 1024
    max_waiting_tokens: int = 1 << 24
    itl_target_s: float = 0.0
    interactive_reserve: float = 0.0
    aging_s: float = 60.0
    batching: Batching = Batching.CONTINUOUS
    batch_size: int = 64
    batch_window_s: float = 0.1
    admission: AdmissionRule = AdmissionRule.PREDICTED
    indivisible: bool = False  # a prompt is computed in one step, however long it is
    aged_tokens: int = 256  # by which an aged sequence advances before others may take its blocks: see aging.py

    @property
    def reserved_step_tokens(self) -> int:
        """Tokens of a step that only the interactive lane may use; the others keep one at least."""
        return min(int(self.max_step_tokens * self.interactive_reserve), self.max_step_tokens - 1)

    @property
    def reserved_running_requests(self) -> int:
        """Places in the running set that only the interactive lane may use; the others keep one at least."""
        return min(int(self.max_running_requests * self.interactive_reserve), self.max_running_requests - 1)
