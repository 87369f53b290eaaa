"""Who may join the running set, and how much padding is computed, under each kind of batching.

Static and dynamic batching are baselines: their batches form when nothing runs and stay as they are until the last
member has ended. A padded batch is a rectangle, as generate() of transformers computes it: every prompt is as long as
the longest, and rows that have ended go on until all have. A real executor computes padding in the matrix products
only and leaves its attention out, and an ended member gives its KV back at once: both to the baseline's advantage.
"""

from trunkline_worker.cache.sequence import Sequence
from trunkline_worker.lanes.lanes import Lane
from trunkline_worker.pace.limits import Batching, SchedulerLimits
from trunkline_worker.queue.waiting import Waiting
from trunkline_worker.step.plan import Padding


class BatchGate:
    """Knows the members of the batch that is being formed or running."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._kind = limits.batching
        self._size = limits.batch_size
        self._window_s = limits.batch_window_s
        self._expected: dict[int, Sequence] = {}  # members of the batch being formed that have not joined yet, by id
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

    def open(self, waiting: Waiting, *, busy: bool, now_s: float) -> None:
        """Called before each step: a batch that is over makes place for the next, whose members are settled then.

        busy: something runs, or holds blocks still
        """
        if self.is_open_always:
            return
        if self._expected:
            self._expected = {number: s for number, s in self._expected.items() if s in waiting}
            if not self._expected and self._prompts:
                self.close()  # it waited for those who went away
        if busy:
            return
        self._expected = {}
        self._prompts, self._padding_left = [], 0
        opens_s = self.opens_s(waiting)
        if not len(waiting) or (opens_s is not None and len(waiting) < self._size and now_s < opens_s):
            return
        for lane in Lane:
            while len(self._expected) < self._size and (sequence := waiting.next(lane)) is not None:
                self._expected[sequence.sequence_id] = sequence
                waiting.defer(sequence)
        waiting.restore()

    def opens_s(self, waiting: Waiting) -> float | None:
        """When a batch will form by itself, where it waits for the clock."""
        if self._kind is not Batching.DYNAMIC or self._expected:
            return None
        return min((s.arrival_s for s in waiting), default=0.0) + self._window_s

    def expected(self, lane: Lane, waiting: Waiting) -> list[Sequence]:
        """Who may join the batch being formed, of a lane, in this order; those that went away meanwhile may not."""
        return [s for s in self._expected.values() if s.lane is lane and s in waiting]

    def joined(self, sequence: Sequence) -> None:
        """A sequence became a member."""
        if self.is_open_always:
            return
        del self._expected[sequence.sequence_id]
        self._prompts.append(len(sequence.token_ids) - sequence.num_computed)
        if not self._expected:
            self.close()

    def close(self) -> None:
        """Nobody else joins: the batch's padding is known."""
        self._expected = {}
        if self._kind is Batching.STATIC and self._prompts:
            width = max(self._prompts)
            self._padding_left = width * len(self._prompts) - sum(self._prompts)
            pairs = sum(width * width - length * length for length in self._prompts) / 2
            self._pairs_per_token = pairs / self._padding_left if self._padding_left else 0.0

    @property
    def is_forming(self) -> bool:
        return bool(self._expected)

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
