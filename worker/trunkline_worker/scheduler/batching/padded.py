"""Static batching with padding, a baseline: a batch is a rectangle, as generate() of transformers computes it.

Every prompt is as long as the longest, and rows that have ended are computed until all have. A real executor computes
padding in the matrix products only and leaves its attention out, which is to the baseline's advantage.
"""

from trunkline_worker.cache.sequence import Sequence
from trunkline_worker.scheduler.batching.static import StaticBatching
from trunkline_worker.scheduler.queue.waiting import Waiting
from trunkline_worker.step.plan import Padding, SequenceStep


class PaddedBatching(StaticBatching):
    """Static batches whose members decode together or not at all."""

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
