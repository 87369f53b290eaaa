"""Where two runs of a greedy stream part, and how close the call was there."""

from collections.abc import Sequence
from dataclasses import dataclass

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
            at = next((i for i, (a, b) in enumerate(zip(other, tokens, strict=False)) if a != b), None)
            if at is not None:
                top = theirs.tops[choice][at]
                found.append(Parting(number, at, top[0] - top[1]))
    return found


def contradictions(got: Sequence[Record]) -> list[str]:
    """Tokens lost or repeated within a stream: there is no excuse for these."""
    return [seam for record in got for seam in record.seams]
