"""What routers have sent to workers, as they tell one another so that they do not herd. Pure."""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Credit:
    """What has been sent to one worker, and not been heard the end of."""

    choices: int
    tokens: int  # uncached tokens of requests without a first output


NO_CREDIT = Credit(0, 0)


def summed(told: Iterable[Mapping[Key, Credit]]) -> dict[Key, Credit]:
    """What several routers have sent where, together."""
    sums: dict[Key, Credit] = {}
    for credits in told:
        for key, credit in credits.items():
            before = sums.get(key, NO_CREDIT)
            sums[key] = Credit(before.choices + credit.choices, before.tokens + credit.tokens)
    return sums
