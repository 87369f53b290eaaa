"""Random steps, as a scheduler could plan them: chunks beside decodes, sequences that come, grow and end."""

import random
from dataclasses import dataclass, field
from typing import Any

from trunkline.sampling_params import EXAMPLES, NUMBERS
from trunkline_worker.step.plan import Padding, Run, Sampling, SequenceStart, SequenceStep, StepPlan

MOST_LOGPROBS = 20
SHARED_PREFIXES = 3


@dataclass(slots=True)
class Running:
    """A sequence as the scheduler knows it."""

    sequence_id: int
    prompt_len: int
    most_tokens: int  # prompt and output
    num_tokens: int  # those whose ids are known to the device
    num_computed: int
    blocks: list[int]
    owned: list[int]  # of those: the ones that no other sequence has
    sampling: Sampling
    token_ids: list[int] = field(default_factory=list)
    in_run: bool = False  # how many tokens it has is not known


class RandomPlans:
    """Plans within the limits of a runner."""

    def __init__(
        self, seed: int, *, vocab_size: int, num_blocks: int, block_size: int, context_length: int, max_seqs: int,
        max_step_tokens: int, everything: bool = True,
    ) -> None:  # fmt: skip
        """everything: penalties, biases, masks and log-probabilities are asked for too"""
        self._draw = random.Random(seed)
        self._vocab, self._size, self._context = vocab_size, block_size, context_length
        self._max_seqs, self._max_tokens, self._everything = max_seqs, max_step_tokens, everything
        self._free = list(range(num_blocks))
        self._running: dict[int, Running] = {}
        self._ended: list[int] = []
        self._count = 0
        self._steps = 0
        length = min(num_blocks // 8, context_length // block_size // 2)
        self._prefixes = [[self._free.pop() for _ in range(length)] for _ in range(SHARED_PREFIXES)]
        self._target = 1  # sequences that should run
        self._constrained = 0.1 if everything else 0.0  # share of the samples that have masks

    def next(self) -> StepPlan:
        """One step; the token of the one before may be unknown still."""
        while True:  # a run that is not known yet may be all that there is
            if (plan := self._drawn()) is not None:
                return plan

    def _drawn(self) -> StepPlan | None:
        draw, most = self._draw, self._max_seqs
        self._steps += 1
        if self._steps % 12 == 1:  # as many as run for a while
            self._target = min(draw.choice([1, 2, 5, most // 4 + 1, most, most, most]), most)
        for sequence in [*self._running.values()]:
            over = sequence.num_tokens >= sequence.most_tokens
            if over or len(self._running) > self._target or draw.random() < 0.005:
                self._end(sequence)
        room = self._max_tokens
        steps: list[SequenceStep] = []
        runs: dict[int, Run] = {}
        starts: list[SequenceStart] = []
        only_decodes = draw.random() < 0.5
        for sequence in draw.sample([*self._running.values()], len(self._running)):
            left = sequence.num_tokens - sequence.num_computed
            if sequence.in_run or not room or (only_decodes and left > 1) or draw.random() < 0.02:
                continue
            count = left if draw.random() < 0.7 else draw.randint(1, left)
            room -= self._step(sequence, min(count, room), steps)
            # A step has room for as many samples as sequences, and this leaves some to the others.
            if steps and steps[-1].sequence_id == sequence.sequence_id and draw.random() < 0.1:
                room -= self._extend(sequence, min(room, self._max_seqs // 16), steps, runs)
        while len(self._running) < self._target and room and not (only_decodes and steps):
            started = self._start()
            if started is None:
                break
            left = started.num_tokens - started.num_computed
            chunk = min(room, left if draw.random() < 0.7 else draw.randint(1, left))
            room -= self._step(started, chunk, steps)
            starts.append(
                SequenceStart(
                    started.sequence_id, started.token_ids, started.prompt_len, list(started.blocks), started.sampling
                )
            )
        if not steps:
            return None
        started_ids = {start.sequence_id for start in starts}
        steps = [step._replace(new_blocks=()) if step.sequence_id in started_ids else step for step in steps]
        ended, self._ended = self._ended, []
        padding = Padding(draw.randint(0, min(room, 40))) if draw.random() < 0.1 else None
        sampled = [i for i, step in enumerate(steps) if step.samples and (i not in runs or runs[i].num_samples)]
        masked = [index for index in sampled if self._constrained and draw.random() < self._constrained]
        return StepPlan(self._steps, steps, starts, ended, padding, masked, runs)

    def failed(self, sequence_ids: list[int]) -> None:
        """These are over: their steps had errors."""
        for sequence_id in sequence_ids:
            if sequence_id in self._running:
                self._end(self._running[sequence_id])

    def _step(self, sequence: Running, count: int, steps: list[SequenceStep]) -> int:
        end = sequence.num_computed + count
        needed = -(-end // self._size) - len(sequence.blocks)
        if needed > len(self._free):
            if sequence.sequence_id in {step.sequence_id for step in steps}:
                raise AssertionError("a sequence stands twice in a step")
            self._end(sequence)  # as if preempted
            return 0
        new = [self._free.pop() for _ in range(max(0, needed))]
        sequence.blocks += new
        sequence.owned += new
        samples = end == sequence.num_tokens
        steps.append(SequenceStep(sequence.sequence_id, 0, sequence.num_computed, count, tuple(new), samples))
        sequence.num_computed = end
        sequence.num_tokens += samples
        return count

    def _extend(self, sequence: Running, room: int, steps: list[SequenceStep], runs: dict[int, Run]) -> int:
        """Adds a run to the last entry, which is the sequence's."""
        draw, step = self._draw, steps[-1]
        known = step.num_computed + step.num_new
        spare = len(sequence.blocks) * self._size - known  # without more blocks
        tokens = draw.choices(range(self._vocab), k=draw.randint(1, 6))
        run = Run.of(tokens, draw.choice([0, 0, len(tokens) // 2, len(tokens)]))
        part = run.first(max(0, min(room, spare, sequence.most_tokens - known - 1)))
        if part is None or not step.samples or len(runs) >= 8 or known >= sequence.most_tokens:
            return 0
        runs[len(steps) - 1] = part
        steps[-1] = step._replace(num_new=step.num_new + part.num_new)
        sequence.num_tokens, sequence.in_run = known, True
        return part.num_new

    def took(self, sequence_id: int, count: int) -> None:
        """A run gave a sequence tokens."""
        if sequence_id in self._running:
            sequence = self._running[sequence_id]
            sequence.num_tokens += count
            sequence.num_computed, sequence.in_run = sequence.num_tokens - 1, False

    def _start(self) -> Running | None:
        draw = self._draw
        prefix = draw.choice([*self._prefixes[:1] * 4, *self._prefixes, [], []])
        cached = len(prefix) * self._size
        longest = self._context - cached - 2
        length = cached + (draw.randint(1, min(60, longest)) if draw.random() < 0.8 else draw.randint(1, longest))
        output = draw.choice([0, 0, 0, draw.randint(1, 30)])  # it was preempted
        total = min(length + output, self._context - 1)
        if -(-total // self._size) - len(prefix) > len(self._free):
            return None
        self._count += 1
        sequence = Running(
            self._count, length, min(self._context, total + draw.randint(1, 60)), total, cached, list(prefix), [],
            self._sampling(length), draw.choices(range(self._vocab), k=total),
        )  # fmt: skip
        self._running[self._count] = sequence
        return sequence

    def _end(self, sequence: Running) -> None:
        del self._running[sequence.sequence_id]
        self._free += sequence.owned
        self._ended.append(sequence.sequence_id)

    def _sampling(self, length: int) -> Sampling:
        draw = self._draw
        plain = Sampling(
            64, seed=draw.getrandbits(64), temperature=draw.choice([0.0, 0.7, 1.0]),
            top_k=draw.choice([0, 20, 1 << 40]), top_p=draw.choice([1.0, 0.95]), min_p=draw.choice([0.0, 0.05]),
        )  # fmt: skip
        if not self._everything or draw.random() < 0.6:
            return plain
        numbers: dict[str, Any] = {name: draw.choice([getattr(plain, name), EXAMPLES[name]]) for name in NUMBERS}
        return Sampling(
            64, plain.seed, **numbers,
            logit_bias=tuple((token, 1.5) for token in draw.sample(range(self._vocab), draw.choice([0, 1, 30, 300]))),
            min_tokens=draw.choice([0, 8]), end_token_ids=frozenset({1, 2}),
            logprobs=draw.choice([None, None, 0, 1, 5, MOST_LOGPROBS]),
            prompt_logprobs=draw.choice([None, None, 0, 1, 5]) if length > 1 else None,
        )  # fmt: skip
