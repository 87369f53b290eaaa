"""How long the innocent tenant is measured while an attack runs."""

from dataclasses import dataclass

ENOUGH = 100  # requests, so that the 99th percentile is not the slowest of them
MOST_S = 20.0
HOLD_S = 10.0  # of an attack that strikes once and then holds what it has


@dataclass(frozen=True, slots=True)
class Window:
    """It lasts at least `least_s`, and then until `requests` requests have ended, but at most `most_s`."""

    least_s: float
    most_s: float
    requests: int = ENOUGH

    def is_over(self, passed_s: float, requests: int) -> bool:
        return passed_s >= self.most_s or (passed_s >= self.least_s and requests >= self.requests)


def fixed(seconds: float) -> Window:
    """As long as that, however many requests there are."""
    return Window(seconds, seconds)


def until_enough(least_s: float) -> Window:
    return Window(least_s, max(least_s, MOST_S))
