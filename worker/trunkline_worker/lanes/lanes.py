"""Lanes: the priority classes of requests."""

from enum import IntEnum


class Lane(IntEnum):
    """Lower numbers go first."""

    INTERACTIVE = 0  # a person waits for every token
    STANDARD = 1  # calls of programs
    BATCH = 2  # bulk work that is not urgent


LANES = tuple(Lane)  # iterated over in every step: iterating over the enumeration itself takes ten times as long


def lane_of(number: int) -> Lane:
    """The lane of a trunkline.v1.Lane number; unspecified is standard."""
    return Lane(number - 1) if number else Lane.STANDARD


def lane_number(lane: Lane) -> int:
    """The trunkline.v1.Lane number of a lane."""
    return lane + 1
