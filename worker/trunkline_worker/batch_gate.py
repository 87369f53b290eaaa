"""Who may join the running set, and how much padding is computed, under each kind of batching.

Static and dynamic batching are baselines: their batches form when nothing runs and stay as they are until the last
member has ended. Where something is left out, it is to the baseline's advantage: padding goes through the matrix
products only, not through attention, and an ended member gives its KV back at once.
"""

from trunkline_worker.limits import Batching, SchedulerLimits


class BatchGate:
    """Counts the members of the batch that is being formed or running."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._kind = limits.batching
        self._size = limits.batch_size
        self._window_s = limits.batch_window_s
        self._room = 0  # members that may still join the batch being formed
        self._prompts: list[int] = []  # tokens that each member had to compute when it joined
        self._padding_left = 0  # positions of the prompts' padding that are not computed yet

    @property
    def is_open_always(self) -> bool:
        return self._kind is Batching.CONTINUOUS

    @property
    def holds_decodes_until_prompts_are_done(self) -> bool:
        """A padded batch is a rectangle: all its members decode together or not at all."""
        return self._kind is Batching.STATIC

    def open(self, *, num_running: int, num_waiting: int, oldest_wait_s: float) -> None:
        """Called before each step: a batch that is over makes place for the next."""
        if self.is_open_always or num_running or self._room:
            return
        self._prompts, self._padding_left = [], 0
        if num_waiting and (
            self._kind is not Batching.DYNAMIC or num_waiting >= self._size or oldest_wait_s >= self._window_s
        ):
            self._room = min(self._size, num_waiting)

    def opens_s(self, oldest_arrival_s: float) -> float | None:
        """When a batch will form by itself, where it waits for the clock."""
        return oldest_arrival_s + self._window_s if self._kind is Batching.DYNAMIC and not self._room else None

    def may_join(self) -> bool:
        return self.is_open_always or self._room > 0

    def joined(self, num_uncomputed: int) -> None:
        """A sequence became a member, with so many tokens to compute."""
        if self.is_open_always:
            return
        self._room -= 1
        self._prompts.append(num_uncomputed)
        if not self._room:
            self.close()

    def close(self) -> None:
        """Nobody else joins: the batch's padding is known."""
        self._room = 0
        if self._kind is Batching.STATIC and self._prompts:
            self._padding_left = max(self._prompts) * len(self._prompts) - sum(self._prompts)

    @property
    def is_forming(self) -> bool:
        return self._room > 0

    def prompt_padding(self, most: int) -> int:
        """Positions of the prompts' padding to compute in a step that has room for `most`."""
        taken = min(most, self._padding_left)
        self._padding_left -= taken
        return taken

    def decode_padding(self, num_decoding: int) -> int:
        """Rows of ended members that a step with this many decodes computes as well."""
        if self._kind is not Batching.STATIC or not num_decoding:
            return 0
        return len(self._prompts) - num_decoding
