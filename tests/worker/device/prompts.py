"""Random steps of prompts without output tokens, as a scheduler could plan them."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from trunkline_worker.step.plan import Sampling, SequenceStart, SequenceStep, StepPlan

NO_TOKENS = Sampling(max_tokens=0)


@dataclass(frozen=True)
class PromptLimits:
    """What bounds the plans."""

    vocab_size: int
    context_length: int
    max_seqs: int
    max_step_tokens: int
    block_size: int
    is_divisible: bool  # whether a prompt may be computed in chunks, after a prefix from the cache


def prompt_plans(limits: PromptLimits, seed: int, count: int) -> Iterator[StepPlan]:
    """Steps in which prompts begin, continue and end. Each prompt has blocks of its own."""
    draw = random.Random(seed)
    most_blocks = -(-limits.context_length // limits.block_size)
    places = list(range(limits.max_seqs))
    running: dict[int, tuple[int, int, int]] = {}  # by sequence id: place, tokens, those of them that are computed
    ended: list[int] = []
    started = 0
    for number in range(1, count + 1):
        room = limits.max_step_tokens
        steps: list[SequenceStep] = []
        starts: list[SequenceStart] = []
        target = draw.randint(1, limits.max_seqs)
        while len(running) < target:
            started += 1
            length = draw.randint(1, draw.choice([3, 70, limits.context_length]))
            cached = draw.randrange(0, length, limits.block_size) if limits.is_divisible else 0
            place = places.pop()
            running[started] = place, length, cached
            blocks = list(range(place * most_blocks, (place + 1) * most_blocks))
            tokens = draw.choices(range(limits.vocab_size), k=length)
            starts.append(SequenceStart(started, tokens, length, blocks, NO_TOKENS))
        last, ended = ended, []
        for sequence_id, (place, length, computed) in [*running.items()]:
            left = length - computed
            fits = left if not limits.is_divisible else min(left, room)
            if fits == 0 or (fits > room and steps):
                continue
            chunk = fits if not limits.is_divisible or draw.random() < 0.7 else draw.randint(1, fits)
            room -= chunk
            steps.append(SequenceStep(sequence_id, 0, computed, chunk, (), chunk == left))
            running[sequence_id] = place, length, computed + chunk
            if chunk == left:
                del running[sequence_id]
                places.append(place)
                ended.append(sequence_id)
        yield StepPlan(number, steps, starts, last)
