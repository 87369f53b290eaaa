"""Who may join the running set, and how much padding is computed, under each kind of batching.

Static and dynamic batching are baselines: their batches form when nothing runs and stay as they are until the last
member has ended. A padded batch is a rectangle, as generate() of transformers computes it: every prompt is as long as
the longest, and rows that have ended go on until all have. A real executor computes padding in the matrix products
only and leaves its attention out, and an ended member gives its KV back at once: both to the baseline's advantage.
"""

from trunkline_worker.limits import Batching, SchedulerLimits
from trunkline_worker.plan import Padding


class BatchGate:
    """Counts the members of the batch that is being formed or running."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._kind = limits.batching
        self._size = limits.batch_size
        self._window_s = limits.batch_window_s
        self._room = 0  # members that may still join the batch being formed
        self._prompts: list[int] = []  # tokens that each member had to compute when it joined
        self._pairs_per_token = 0.0
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
            width = max(self._prompts)
            self._padding_left = width * len(self._prompts) - sum(self._prompts)
            pairs = sum(width * width - length * length for length in self._prompts) / 2
            self._pairs_per_token = pairs / self._padding_left if self._padding_left else 0.0

    @property
    def is_forming(self) -> bool:
        return self._room > 0

    def padding(self, room: int, contexts: list[int]) -> Padding | None:
        """What a step that has room for so many more tokens computes for nobody.

        contexts: KV tokens of each sequence that decodes in it
        """
        if self._kind is not Batching.STATIC:
            return None
        taken = min(room, self._padding_left)
        self._padding_left -= taken
        rows = len(self._prompts) - len(contexts) if contexts else 0
        kv_tokens = len(self._prompts) * max(contexts) - sum(contexts) if contexts else 0
        return Padding(taken + rows, kv_tokens, taken * self._pairs_per_token)
