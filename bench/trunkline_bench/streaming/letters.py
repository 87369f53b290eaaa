"""Tokens of one letter that says in which step they were due, for who passes on no text but what it made of ids."""

import string

LETTERS = string.ascii_letters  # a step has the one at its number, modulo how many there are
EARLY_S = 0.005  # before its step is due, a token may come: timers go off early


def letter_place(step: int) -> int:
    return step % len(LETTERS)


def age_s(letter: str, now_s: float, steps_per_s: float) -> float:
    """Of a token of the newest step that had this letter, by the machine's monotonic clock; right up to two seconds.

    Raises ValueError for what is no letter.
    """
    newest = int((now_s + EARLY_S) * steps_per_s)
    step = newest - letter_place(newest - LETTERS.index(letter))
    return now_s - step / steps_per_s
