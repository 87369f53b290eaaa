"""How sequences come together: continuous batching, which workers serve with, and baselines for measurements."""

from trunkline_worker.cache.sequence import Sequence
from trunkline_worker.scheduler.limits import Batching, SchedulerLimits
from trunkline_worker.scheduler.waiting import Waiting
from trunkline_worker.step.lanes import LANES, Lane
from trunkline_worker.step.plan import Padding, SequenceStep

# Deferred sequences of one tenant after which the next tenant's are looked at, so that one tenant's sequences that wait
# for a prefix do not hide all others.
MAX_DEFERRED_OF_TENANT = 16


class ContinuousBatching:
    """Any waiting sequence may join in any step, in the order of the queue. Nothing is padded."""

    # Whether sequences may join while others run. Only then do aging and preemption make room for them.
    admits_while_running = True

    def __init__(self, waiting: Waiting) -> None:
        self._waiting = waiting
        self._num_deferred = 0

    def begin_step(self, *, busy: bool, now_s: float) -> None:
        """Called before each step.

        busy: a sequence runs, or a step in flight still writes blocks
        """

    def opens_s(self) -> float | None:
        """When the passing of time alone lets sequences join; None: it does not."""
        return None

    def next(self, lane: Lane) -> Sequence | None:
        """The next sequence of a lane that may join, apart from those deferred. It stays in the queue."""
        return self._waiting.next(lane)

    def defer(self, sequence: Sequence) -> None:
        """Passes over the sequence that next() has just returned, until restore()."""
        self._num_deferred += 1
        if self._num_deferred % MAX_DEFERRED_OF_TENANT:
            self._waiting.defer(sequence)
        else:
            self._waiting.pass_over(sequence.lane)

    def restore(self) -> None:
        """Every sequence counts again."""
        self._num_deferred = 0
        self._waiting.restore()

    def joined(self, sequence: Sequence) -> None:
        """Called when a sequence has joined the running set."""

    def close(self) -> None:
        """Called when the next sequence does not fit: a batch that is being formed is complete without it."""

    def holds_decodes(self, running: list[Sequence]) -> bool:
        """Whether no running sequence may decode in this step."""
        return False

    def releases_decodes(self, running: list[Sequence]) -> bool:
        """Called when a step would be empty. Returns whether decodes that were held back are to be tried again."""
        return False

    def padding(self, tokens_left: int, steps: list[SequenceStep]) -> Padding | None:
        """What a step computes only to pad its batch; None: nothing.

        tokens_left: tokens that the step still has room for
        """
        return None


class StaticBatching(ContinuousBatching):
    """A baseline without padding. A batch forms when nothing runs, and stays as it is until its last member has ended.
    A member that has ended gives its KV back at once, which is to the baseline's advantage.

    A batch forms of whatever waits; with `window_s` (dynamic batching), once `size` sequences wait or the oldest has
    waited for that long.
    """

    admits_while_running = False

    def __init__(self, waiting: Waiting, size: int, window_s: float = 0.0) -> None:
        super().__init__(waiting)
        self._size = size
        self._window_s = window_s
        self._expected: dict[int, Sequence] = {}  # members of the batch being formed that have not joined yet, by id
        self._deferred: set[int] = set()  # ids of those among them that are passed over
        self._prompts: list[int] = []  # tokens that each member had to compute when it joined

    def begin_step(self, *, busy: bool, now_s: float) -> None:
        if self._expected:
            self._expected = {number: s for number, s in self._expected.items() if s.is_ready}
            if not self._expected and self._prompts:
                self.close()  # the members it waited for were aborted
        if busy:
            return
        self._expected = {}
        self._prompts = []
        opens_s = self.opens_s()
        num_waiting = self._waiting.num_ready
        if num_waiting and (opens_s is None or num_waiting >= self._size or now_s >= opens_s):
            self._settle_members()

    def _settle_members(self) -> None:
        for lane in LANES:
            while len(self._expected) < self._size and (sequence := self._waiting.next(lane)) is not None:
                self._expected[sequence.sequence_id] = sequence
                self._waiting.defer(sequence)
        self._waiting.restore()

    def opens_s(self) -> float | None:
        if self._expected or not self._window_s:
            return None
        return min((s.arrival_s for s in self._waiting if s.is_ready), default=0.0) + self._window_s

    def next(self, lane: Lane) -> Sequence | None:
        for sequence_id, sequence in self._expected.items():
            if sequence.lane is lane and sequence_id not in self._deferred and sequence in self._waiting:
                return sequence
        return None

    def defer(self, sequence: Sequence) -> None:
        self._deferred.add(sequence.sequence_id)

    def restore(self) -> None:
        self._waiting.restore()
        self._deferred.clear()

    def joined(self, sequence: Sequence) -> None:
        del self._expected[sequence.sequence_id]
        self._prompts.append(len(sequence.token_ids) - sequence.num_computed)
        if not self._expected:
            self.close()

    def close(self) -> None:
        self._expected = {}


class PaddedBatching(StaticBatching):
    """A baseline in which a batch is a rectangle, as generate() of transformers computes it: its members decode
    together or not at all.

    Every prompt is as long as the longest, and rows that have ended are computed until all have. A real executor
    computes padding in the matrix products only and leaves its attention out, which is to the baseline's advantage.
    """

    def __init__(self, waiting: Waiting, size: int) -> None:
        super().__init__(waiting, size)
        self._pairs_per_token = 0.0
        self._padding_left = 0  # positions of the prompts' padding that are not computed yet

    def begin_step(self, *, busy: bool, now_s: float) -> None:
        super().begin_step(busy=busy, now_s=now_s)
        if not busy:
            self._padding_left = 0

    def close(self) -> None:
        super().close()
        if not self._prompts:
            return
        width = max(self._prompts)
        self._padding_left = width * len(self._prompts) - sum(self._prompts)
        pairs = sum(width * width - length * length for length in self._prompts) / 2
        self._pairs_per_token = pairs / self._padding_left if self._padding_left else 0.0

    def holds_decodes(self, running: list[Sequence]) -> bool:
        return bool(self._expected) or any(sequence.num_unscheduled > 1 for sequence in running)

    def releases_decodes(self, running: list[Sequence]) -> bool:
        # A sequence that waits for a prefix computed by a member would never start: the batch is complete without it.
        if not any(sequence.num_unscheduled == 1 for sequence in running):
            return False
        self.close()
        return True

    def padding(self, tokens_left: int, steps: list[SequenceStep]) -> Padding | None:
        contexts = [step.num_computed + 1 for step in steps if step.num_new == 1]
        taken = min(tokens_left, self._padding_left)
        self._padding_left -= taken
        rows = len(self._prompts) - len(contexts) if contexts else 0
        kv_tokens = len(self._prompts) * max(contexts) - sum(contexts) if contexts else 0
        return Padding(taken + rows, kv_tokens, taken * self._pairs_per_token)


def batching_policy(limits: SchedulerLimits, waiting: Waiting) -> ContinuousBatching:
    """The kind of batching that the limits name."""
    match limits.batching:
        case Batching.CONTINUOUS:
            return ContinuousBatching(waiting)
        case Batching.STATIC:
            return PaddedBatching(waiting, limits.batch_size)
        case Batching.STATIC_UNPADDED:
            return StaticBatching(waiting, limits.batch_size)
        case Batching.DYNAMIC:
            return StaticBatching(waiting, limits.batch_size, limits.batch_window_s)
