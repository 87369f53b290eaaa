"""What routers have sent to workers. They exchange it so that they do not all choose the same worker. Pure."""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Credit:
    """Requests that were sent to one worker and have not ended."""

    choices: int
    tokens: int  # uncached tokens of requests without a first output


NO_CREDIT = Credit(0, 0)


def summed(told: Iterable[Mapping[Key, Credit]]) -> dict[Key, Credit]:
    """Returns what several routers have sent to each worker, together."""
    sums: dict[Key, Credit] = {}
    for credits in told:
        for key, credit in credits.items():
            before = sums.get(key, NO_CREDIT)
            sums[key] = Credit(before.choices + credit.choices, before.tokens + credit.tokens)
    return sums
