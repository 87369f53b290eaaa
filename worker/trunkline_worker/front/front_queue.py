"""The front's own count of choices that wait in the engine, so that a full queue refuses without waiting for a step."""

from collections import defaultdict
from dataclasses import dataclass

from trunkline_worker.lanes.lanes import Lane
from trunkline_worker.lanes.queue_bounds import QueueBounds


@dataclass(slots=True)
class TenantQueue:
    """The waiting choices of one tenant in one lane."""

    weight: float
    count: int = 0
    num_tokens: int = 0


class FrontQueue:
    """Choices that the front has passed to the engine, and whose admission the engine has not yet reported."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._bounds = QueueBounds(max_requests, max_tokens)
        self.count = [0 for _ in Lane]
        self._tokens = [0 for _ in Lane]
        self._tenants: list[dict[str, TenantQueue]] = [{} for _ in Lane]
        self._weights: defaultdict[Lane, float] = defaultdict(float)  # sum over the tenants with waiting choices
        self._entries: dict[int, tuple[Lane, str, int]] = {}  # by handle: lane, tenant, tokens

    def admits(self, lane: Lane, tenant: str, weight: float, num_tokens: int) -> bool:
        """Whether one more choice may wait, by the rules of queue_bounds.py."""
        queue = self._tenants[lane].get(tenant)
        own = queue.weight if queue else 0.0
        return self._bounds.admits(
            lane,
            num_tokens,
            waiting=self.count,
            waiting_tokens=self._tokens,
            of_tenant=queue.count if queue else 0,
            tokens_of_tenant=queue.num_tokens if queue else 0,
            share=weight / (weight + max(0.0, self._weights[lane] - own)),
        )

    def put(self, handle: int, lane: Lane, tenant: str, weight: float, num_tokens: int) -> None:
        """Adds a choice that was passed to the engine."""
        self._entries[handle] = (lane, tenant, num_tokens)
        self.count[lane] += 1
        self._tokens[lane] += num_tokens
        queue = self._tenants[lane].get(tenant)
        if queue is None:
            queue = self._tenants[lane][tenant] = TenantQueue(weight)
            self._weights[lane] += weight
        queue.count += 1
        queue.num_tokens += num_tokens

    def holds(self, handle: int) -> bool:
        """Whether the choice waits."""
        return handle in self._entries

    def admitted(self, handle: int) -> None:
        """Removes a choice that the engine took into its running set. Does nothing if it is not here."""
        entry = self._entries.pop(handle, None)
        if entry is None:
            return
        lane, tenant, num_tokens = entry
        self.count[lane] -= 1
        self._tokens[lane] -= num_tokens
        queue = self._tenants[lane][tenant]
        queue.count -= 1
        queue.num_tokens -= num_tokens
        if not queue.count:
            del self._tenants[lane][tenant]
            self._weights[lane] -= queue.weight

    left = admitted  # removes a choice that ended, possibly before it ran
