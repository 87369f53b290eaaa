"""The interface between the scheduler and the kind of batching it is configured for."""

from typing import Protocol

from trunkline_worker.cache.sequence import Sequence
from trunkline_worker.lanes.lanes import Lane
from trunkline_worker.scheduler.batching.continuous import ContinuousBatching
from trunkline_worker.scheduler.batching.dynamic import DynamicBatching
from trunkline_worker.scheduler.batching.padded import PaddedBatching
from trunkline_worker.scheduler.batching.static import StaticBatching
from trunkline_worker.scheduler.pace.limits import Batching, SchedulerLimits
from trunkline_worker.scheduler.queue.waiting import Waiting
from trunkline_worker.step.plan import Padding, SequenceStep


class BatchingPolicy(Protocol):
    """Decides which waiting sequences may join, when running sequences may decode, and how much padding is computed."""

    @property
    def admits_while_running(self) -> bool:
        """Whether sequences may join while others run. Only then do aging and preemption make room for them."""

    def begin_step(self, *, busy: bool, now_s: float) -> None:
        """Called before each step.

        busy: a sequence runs, or a step in flight still writes blocks
        """

    def opens_s(self) -> float | None:
        """When the passing of time alone lets sequences join; None: it does not."""

    def next(self, lane: Lane) -> Sequence | None:
        """The next sequence of a lane that may join, apart from those deferred. It stays in the queue."""

    def defer(self, sequence: Sequence) -> None:
        """Passes over the sequence that next() has just returned, until restore()."""

    def restore(self) -> None:
        """Every sequence counts again."""

    def joined(self, sequence: Sequence) -> None:
        """Called when a sequence has joined the running set."""

    def close(self) -> None:
        """Called when the next sequence does not fit: a batch that is being formed is complete without it."""

    def holds_decodes(self, running: list[Sequence]) -> bool:
        """Whether no running sequence may decode in this step."""

    def releases_decodes(self, running: list[Sequence]) -> bool:
        """Called when a step would be empty. Returns whether decodes that were held back are to be tried again."""

    def padding(self, tokens_left: int, steps: list[SequenceStep]) -> Padding | None:
        """What a step computes only to pad its batch; None: nothing.

        tokens_left: tokens that the step still has room for
        """


def batching_policy(limits: SchedulerLimits, waiting: Waiting) -> BatchingPolicy:
    """The policy that the limits name."""
    match limits.batching:
        case Batching.CONTINUOUS:
            return ContinuousBatching(waiting)
        case Batching.STATIC:
            return PaddedBatching(waiting, limits.batch_size)
        case Batching.STATIC_UNPADDED:
            return StaticBatching(waiting, limits.batch_size)
        case Batching.DYNAMIC:
            return DynamicBatching(waiting, limits.batch_size, limits.batch_window_s)
