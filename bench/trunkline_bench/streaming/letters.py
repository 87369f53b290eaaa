"""One-letter tokens that name the step in which they were due, for gateways that make text from token ids."""

import string

LETTERS = string.ascii_letters  # step n has the letter n % len(LETTERS)
EARLY_S = 0.005  # how early a token may come, since timers may fire early


def letter_place(step: int) -> int:
    return step % len(LETTERS)


def age_s(letter: str, now_s: float, steps_per_s: float) -> float:
    """Age of a token of the newest step with this letter, by the monotonic clock. Valid up to about two seconds.

    Raises ValueError if `letter` is none of LETTERS.
    """
    newest = int((now_s + EARLY_S) * steps_per_s)
    step = newest - letter_place(newest - LETTERS.index(letter))
    return now_s - step / steps_per_s
