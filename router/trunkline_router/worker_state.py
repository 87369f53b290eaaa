"""What a router knows of one worker that serves: its model, its cache, its load, and what was sent there.

No I/O and no clock: the simulated fleet routes by the same numbers.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from trunkline.v1.worker_pb2 import GetModelResponse, LoadSample
from trunkline_router.index import WorkerBlocks
from trunkline_router.policy import WorkerView


class WorkerState:
    """See the module."""

    def __init__(self, model: GetModelResponse, blocks: WorkerBlocks) -> None:
        self.model = model
        self.blocks = blocks
        self.load = LoadSample()
        # What this router has sent there and not heard the end of:
        self.open_choices = 0
        self.queued_tokens = 0  # uncached tokens of requests without a first output

    @property
    def accepts(self) -> bool:
        return not self.load.draining

    def view(self, matched_blocks: int) -> WorkerView:
        """For the policy. The sample lags behind and counts other routers' requests too: the larger number counts."""
        return WorkerView(
            worker_id=self.model.worker_id,
            matched_tokens=matched_blocks * self.model.block_size,
            queued_tokens=max(self.queued_tokens, self.load.waiting_uncached_tokens),
            running=max(self.open_choices, self.load.running + self.load.waiting),
        )

    @contextmanager
    def in_flight(self, *, choices: int, uncached_tokens: int, chain: Sequence[int]) -> Iterator["InFlight"]:
        """Counts a request here from dispatch to its end, whichever way it ends."""
        flight = InFlight(self, choices, uncached_tokens, chain)
        try:
            yield flight
        finally:
            flight.end()


class InFlight:
    """A request's part in its worker's load. Ends of all kinds are harmless when repeated."""

    def __init__(self, worker: WorkerState, choices: int, uncached_tokens: int, chain: Sequence[int]) -> None:
        self._worker = worker
        self._choices = choices
        self._queued = uncached_tokens
        self._chain = chain
        worker.open_choices += choices
        worker.queued_tokens += uncached_tokens
        worker.blocks.expect(chain)

    def has_started(self) -> None:
        """Its prompt is computed, or never will be: it queues no longer."""
        self._worker.queued_tokens -= self._queued
        self._queued = 0

    def end(self) -> None:
        """The worker does nothing for it any more."""
        self.has_started()
        self._worker.open_choices -= self._choices
        self._choices = 0
        self._worker.blocks.stop_expecting(self._chain)
        self._chain = ()
