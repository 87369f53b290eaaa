"""A proposer of random runs that knows what sequences will generate."""

import random
from collections import Counter
from collections.abc import Callable

from trunkline_worker.cache.sequence import Sequence
from trunkline_worker.step.plan import Run

# The tokens that follow those of a sequence, as far as it will have any.
Continuation = Callable[[Sequence], list[int]]


class RandomProposer:
    """Proposes right tokens, some of them as forced ones, and then wrong ones; sometimes nothing, or more than a step
    can take. It follows three sequences of four."""

    def __init__(self, continuation: Continuation, vocab: int, seed: int, *, longest: int = 9) -> None:
        self._continuation, self._vocab, self._longest = continuation, vocab, longest
        self._draw = random.Random(seed)
        self.proposed: Counter[str] = Counter()  # tokens by kind

    def follows(self, sequence: Sequence) -> bool:
        return sequence.sequence_id % 4 != 0

    def holds(self, sequence: Sequence) -> bool:
        return sequence.num_pending > 0 and self.follows(sequence)

    def propose(self, sequence: Sequence, most: int) -> Run | None:
        assert most >= 0
        assert sequence.sequence_id % 4
        draw = self._draw
        right = self._continuation(sequence)[: draw.randint(0, self._longest)]
        forced = draw.randint(0, len(right)) if draw.random() < 0.4 else 0
        wrong = [draw.randrange(self._vocab) for _ in range(draw.randint(0, 3))] if draw.random() < 0.5 else []
        self.proposed.update({"right": len(right) - forced, "forced": forced, "wrong": len(wrong)})
        return Run.of([*right, *wrong], forced) if draw.random() < 0.8 else None
