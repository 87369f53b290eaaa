"""Lanes: the priority classes of requests, and which requests are refused because too many wait already.

A lane is full when it and the lanes above it have as many waiting requests as the bounds allow; requests in lower lanes
do not count. In a full lane a tenant with less than its fair share of the bound may still queue, so one tenant's flood
does not shut others out of this lane or a lower one. At most twice the bound waits, by lane.
"""

from dataclasses import dataclass
from enum import IntEnum

from trunkline.status import CODE_RESOURCE_EXHAUSTED, OVERLOADED, RequestRefused


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


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """Bounds of the number of waiting choices, and of their known tokens."""

    max_requests: int
    max_tokens: int

    def admits(
        self,
        lane: Lane,
        num_tokens: int,
        *,
        waiting: list[int],
        waiting_tokens: list[int],
        of_tenant: int,
        tokens_of_tenant: int,
        share: float,
    ) -> bool:
        """Whether one more choice of `num_tokens` may wait.

        waiting, waiting_tokens: by lane; of_tenant, tokens_of_tenant: of its tenant, in its lane and those above it;
        share: the tenant's part, in (0, 1], of the weights of all tenants that wait there, itself included
        """
        ahead, tokens_ahead = sum(waiting[: lane + 1]), sum(waiting_tokens[: lane + 1])
        # One choice may always wait alone: otherwise a prompt longer than the bound would always be refused.
        fits = ahead < self.max_requests and (tokens_ahead + num_tokens <= self.max_tokens or not ahead)
        if fits:
            return True
        within_twice = ahead < 2 * self.max_requests and tokens_ahead + num_tokens <= 2 * self.max_tokens
        # A tenant with no waiting choice may always have one.
        within_share = not of_tenant or (
            of_tenant < int(self.max_requests * share) and tokens_of_tenant + num_tokens <= self.max_tokens * share
        )
        return share < 1.0 and within_twice and within_share


def queue_full(lane: Lane, waiting: list[int], retry_delay_ms: int) -> RequestRefused:
    """The error for a refused request."""
    return RequestRefused(
        CODE_RESOURCE_EXHAUSTED,
        OVERLOADED,
        f"the queue is full: {sum(waiting[: lane + 1])} choices of the {lane.name.lower()} lane or above wait already",
        retry_delay_ms=max(1, retry_delay_ms),
    )
