"""How long the innocent tenant is measured while an attack runs."""

from dataclasses import dataclass

ENOUGH = 100  # requests, so that the 99th percentile is not the slowest
MOST_S = 20.0
HOLD_S = 10.0  # of an attack that strikes once and then holds its connections or streams open


@dataclass(frozen=True, slots=True)
class Window:
    """Lasts at least `least_s`, then until `requests` requests have ended, but at most `most_s`."""

    least_s: float
    most_s: float
    requests: int = ENOUGH

    def is_over(self, passed_s: float, requests: int) -> bool:
        return passed_s >= self.most_s or (passed_s >= self.least_s and requests >= self.requests)


def fixed(seconds: float) -> Window:
    """A window of this length, regardless of the number of requests."""
    return Window(seconds, seconds)


def until_enough(least_s: float) -> Window:
    return Window(least_s, max(least_s, MOST_S))
