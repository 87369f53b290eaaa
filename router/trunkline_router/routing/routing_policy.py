"""The names of the routing policies, and the state that they keep between requests."""

from collections import OrderedDict
from enum import StrEnum

MOST_AFFINITY_KEYS = 1 << 16


class PolicyName(StrEnum):
    """The values of --policy."""

    PREDICTED_TTFT = "predicted-ttft"
    LEAST_LOAD = "least-load"
    ROUND_ROBIN = "round-robin"
    CONSISTENT_HASH = "consistent-hash"
    SESSION_AFFINITY = "session-affinity"


class RoutingPolicy:
    """The policy in use and its state, which route() reads and has_sent() changes."""

    def __init__(self, name: PolicyName | str = PolicyName.PREDICTED_TTFT) -> None:
        self.name = PolicyName(name)
        self.turn = 0  # requests sent so far
        self._holders: OrderedDict[str, str] = OrderedDict()  # affinity key → worker id, the latest last

    def holder(self, affinity_key: str) -> str | None:
        """Returns the worker of the last request with this key, None if there is none."""
        return self._holders.get(affinity_key) if affinity_key else None

    def has_sent(self, affinity_key: str, worker_id: str) -> None:
        """Records that a request with this key (empty: none) goes to this worker."""
        self.turn += 1
        if not affinity_key or self.name is not PolicyName.SESSION_AFFINITY:
            return
        self._holders[affinity_key] = worker_id
        self._holders.move_to_end(affinity_key)
        if len(self._holders) > MOST_AFFINITY_KEYS:
            self._holders.popitem(last=False)
