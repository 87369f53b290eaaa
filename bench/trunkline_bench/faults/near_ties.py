"""Where two runs of a stream diverge, and how near the tie was there."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from trunkline_bench.faults.streams import Order, Record
from trunkline_worker.step.sampling_key import choice_seed, position_key, race_noise

# bfloat16 has 8 bits of precision: logits from 16 to 32, which the demo model reaches, are 0.125 apart. Rounding does
# not close a gap of more than a few such steps.
NEAR = 0.5


@dataclass(frozen=True, slots=True)
class Parting:
    """The first difference between two runs of a choice."""

    stream: int
    choice: int
    token_index: int
    gap: float | None  # as from gap_of()

    @property
    def is_near_tie(self) -> bool:
        return self.gap is not None and abs(self.gap) <= NEAR


def is_comparable(order: Order) -> bool:
    """Whether the log-probabilities show how near another token was.

    They do not with penalties, which change the scores, nor with top_k or top_p, which may keep or drop a token at the
    edge whatever its score. The model has a default top_p, so the request must ask for 1."""
    options = order.options
    return "repetition_penalty" not in options and (
        order.is_greedy or (options.get("top_p") == 1.0 and "top_k" not in options)
    )


def partings(wanted: Sequence[Order], got: Sequence[Record], expected: Sequence[Record]) -> list[Parting]:
    """The divergences of all comparable streams. Every stream must have asked for log-probabilities."""
    found = []
    for number, (order, mine, theirs) in enumerate(zip(wanted, got, expected, strict=True)):
        if not is_comparable(order):
            continue
        for choice in sorted(theirs.token_ids.keys() | mine.token_ids.keys()):
            other, tokens = mine.token_ids.get(choice, []), theirs.token_ids.get(choice, [])
            pairs = enumerate(zip_longest(other, tokens))  # a missing tail counts as a difference
            at = next((i for i, (a, b) in pairs if a != b), None)
            if at is not None:
                found.append(Parting(number, choice, at, gap_of(order, theirs, mine, choice, at)))
    return found


def gap_of(order: Order, expected: Record, got: Record, choice: int, at: int) -> float | None:
    """How far the expected token's score led the other token's score in the expected run.

    The score of a greedy stream is the log-probability; of a sampled one, the log-probability over the temperature plus
    the noise of the draw. A sampled token outside the reported top ones has the log-probability of its own run, which
    was the same up to there. Returns None if no gap explains the divergence: a token is missing, a greedy stream took
    a token outside the top ones, or a token that belongs to the top ones is not among them."""
    if any(at >= len(record.token_ids.get(choice, [])) for record in (expected, got)):
        return None
    chosen_id, chosen = expected.logprobs[choice][at]
    other_id = got.token_ids[choice][at]
    tops = dict(expected.tops[choice][at])
    other = tops.get(other_id)
    if other is None and not order.is_greedy:
        told_id, other = got.logprobs[choice][at]
        if told_id != other_id or other > min(tops.values()) + NEAR:
            return None
    if other is None:
        return None
    if order.is_greedy:
        return chosen - other
    key = position_key(choice_seed(order.options["seed"], choice), len(order.prompt) + at)
    noise = race_noise(np.array([key], np.uint64), np.array([chosen_id, other_id]))
    return (chosen - other) / float(order.options["temperature"]) + float(noise[0] - noise[1])


def contradictions(got: Sequence[Record]) -> list[str]:
    """Tokens lost or repeated within a stream or at its end, which no near tie explains. One line each."""
    seams = [seam for record in got for seam in record.seams]
    for number, record in enumerate(got):
        told = sum(map(len, record.token_ids.values()))
        if not record.error and (told != record.usage[1] or set(record.finish) != set(record.token_ids)):
            seams.append(f"stream {number}: {told} tokens, {record.usage[1]} in its usage, ends {record.finish}")
    return seams
