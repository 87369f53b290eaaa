"""Where two runs of a greedy stream part, and how close the call was there."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from trunkline_bench.faults.streams import Order, Record


@dataclass(frozen=True, slots=True)
class Parting:
    """The first token at which a choice differs."""

    stream: int
    token_index: int
    gap: float  # between the log-probabilities of the two likeliest tokens there, in the undisturbed run


def partings(wanted: Sequence[Order], got: Sequence[Record], expected: Sequence[Record]) -> list[Parting]:
    """Of greedy streams without penalties: for others the likeliest token is not the one that is chosen."""
    found = []
    for number, (order, mine, theirs) in enumerate(zip(wanted, got, expected, strict=True)):
        if not order.is_greedy or "repetition_penalty" in order.options:
            continue
        for choice, tokens in theirs.token_ids.items():
            other = mine.token_ids.get(choice, [])
            pairs = enumerate(zip_longest(other, tokens))  # a tail that is missing differs too
            at = next((i for i, (a, b) in pairs if a != b), None)
            if at is not None:
                top = theirs.tops[choice][at] if at < len(tokens) else [0.0, 0.0]
                found.append(Parting(number, at, top[0] - top[1]))
    return found


def contradictions(got: Sequence[Record]) -> list[str]:
    """Tokens lost or repeated within a stream, or at its end: there is no excuse for these."""
    seams = [seam for record in got for seam in record.seams]
    for number, record in enumerate(got):
        told = sum(map(len, record.token_ids.values()))
        if not record.error and (told != record.usage[1] or set(record.finish) != set(record.token_ids)):
            seams.append(f"stream {number}: {told} tokens, {record.usage[1]} in its usage, ends {record.finish}")
    return seams
