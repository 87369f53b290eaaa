"""Who is refused because too much waits already.

A lane is full when it and the lanes above it have as many waiting as the bounds allow; what waits in lower lanes does
not count. In a full lane a tenant with less than its fair share of the bound is still let in, so one tenant's flood
does not shut the others out, of this lane or of a lower one: what waits is at most twice the bound, by lane.
"""

from dataclasses import dataclass

from trunkline.status import CODE_RESOURCE_EXHAUSTED, OVERLOADED, RequestRefused
from trunkline_worker.lanes.lanes import Lane


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """Of choices, and of their known tokens."""

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
        """Whether one more may wait.

        waiting, waiting_tokens: by lane; of_tenant, tokens_of_tenant: what of its tenant waits in its lane and above
        share: the tenant's part of the weights of all that wait there, itself included, in (0, 1]
        """
        ahead, tokens_ahead = sum(waiting[: lane + 1]), sum(waiting_tokens[: lane + 1])
        # Something may always wait alone: a prompt longer than the bound is not refused for ever.
        fits = ahead < self.max_requests and (tokens_ahead + num_tokens <= self.max_tokens or not ahead)
        if fits:
            return True
        within_twice = ahead < 2 * self.max_requests and tokens_ahead + num_tokens <= 2 * self.max_tokens
        # A tenant that has nothing here may have one in any case.
        within_share = not of_tenant or (
            of_tenant < int(self.max_requests * share) and tokens_of_tenant + num_tokens <= self.max_tokens * share
        )
        return share < 1.0 and within_twice and within_share


def queue_full(lane: Lane, waiting: list[int], retry_delay_ms: int) -> RequestRefused:
    """What a refused caller is told."""
    return RequestRefused(
        CODE_RESOURCE_EXHAUSTED,
        OVERLOADED,
        f"the queue is full: {sum(waiting[: lane + 1])} choices of the {lane.name.lower()} lane or above wait already",
        retry_delay_ms=max(1, retry_delay_ms),
    )
