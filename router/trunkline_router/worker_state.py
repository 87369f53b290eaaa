"""What a router knows of one worker that serves: its model, its cache, its load, and what was sent there.

No I/O and no clock: the simulated fleet routes by the same numbers.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from trunkline.v1.worker_pb2 import GetModelResponse, LoadSample
from trunkline_router.index import WorkerBlocks
from trunkline_router.policy import RoutePlan, WorkerView
from trunkline_router.route_request import RouteRequest


class WorkerState:
    """See the module."""

    def __init__(self, model: GetModelResponse, blocks: WorkerBlocks) -> None:
        self.model = model
        self.blocks = blocks
        self.load = LoadSample()
        self.slow_start_share = 1.0  # in (0, 1]: how much of a full share it takes while it is fresh; 1: all of it
        # Credits of other routers: what they have sent there and it may not have reported yet.
        self.foreign_tokens = 0
        self.foreign_choices = 0
        # What this router has sent there and not heard the end of:
        self.open_choices = 0
        self.queued_tokens = 0  # uncached tokens of requests without a first output

    @property
    def accepts(self) -> bool:
        return not self.load.draining

    def heard(self, now_s: float) -> None:
        """Something came on the watch stream."""

    def take_load(self, sample: LoadSample, now_s: float) -> None:
        """What the worker says of its load."""
        self.heard(now_s)
        self.load = sample

    def view(self, matched_blocks: int) -> WorkerView:
        """For the policy. The sample lags behind and counts other routers' requests too: the larger number counts."""
        return WorkerView(
            worker_id=self.model.worker_id,
            matched_tokens=matched_blocks * self.model.block_size,
            queued_tokens=max(self.queued_tokens, self.load.waiting_uncached_tokens),
            running=max(self.open_choices, self.load.running + self.load.waiting),
        )

    @contextmanager
    def in_flight(self, request: RouteRequest, plan: RoutePlan, chain: Sequence[int]) -> Iterator["InFlight"]:
        """Counts a request here from dispatch to its end, whichever way it ends."""
        flight = InFlight(self, request.choices, len(request.prompt) - plan.matched_tokens, chain)
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

    def has_started(self, cached_tokens: int | None = None) -> None:
        """Its prompt is computed, or never will be: it queues no longer.

        cached_tokens: of the prompt, found in the worker's cache; None: it was not said
        """
        self._worker.queued_tokens -= self._queued
        self._queued = 0

    def end(self) -> None:
        """The worker does nothing for it any more."""
        self.has_started()
        self._worker.open_choices -= self._choices
        self._choices = 0
        self._worker.blocks.stop_expecting(self._chain)
        self._chain = ()
