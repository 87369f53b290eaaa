"""What the routing policies get: a request, and the state that they keep between requests. Also their names."""

from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

INTERACTIVE, STANDARD, BATCH = range(3)
NUM_LANES = 3
MOST_AFFINITY_KEYS = 1 << 16
MOST_NOTED, MOST_BLOCKS = 256, 2048  # prompts, and blocks of each: 4 MiB of keys


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """A request at the moment of the decision. If it continues after a failure, its prompt includes the output so far.

    `now_s` is on the same clock as the times that WorkerState gets.
    """

    prompt: Sequence[int]
    now_s: float = 0.0
    salt: bytes = b""
    lane: int = STANDARD  # 0, 1 or 2: lower ones go first
    choices: int = 1
    may_use_cache: bool = True  # False if every token of the prompt must be computed
    affinity_key: str = ""  # equal for requests of one conversation; empty: none
    adapter: tuple[str, str] = ("", "")  # its name and version; empty: none
    beside_prompts: int = 0  # further prompts of the request, after which nothing is generated
    beside_tokens: int = 0  # of all of these

    @property
    def beside_context(self) -> float:
        """Typical (query, key) pairs of a token of the further prompts, which are about equally long."""
        return self.beside_tokens / max(1, self.beside_prompts) / 2

    def most_reusable(self, block_size: int) -> int:
        """Returns how many prompt tokens a cache can save: whole blocks, and at least one token is computed."""
        return (len(self.prompt) - 1) // block_size * block_size if self.may_use_cache else 0


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


class NotedPrompts:
    """The latest prompts that were sent to workers, as their tenants, block sizes and keys; see hot_prefixes.py."""

    def __init__(self) -> None:
        self._latest: deque[tuple[str, int, array[int]]] = deque(maxlen=MOST_NOTED)
        self._count = 0

    def note(self, tenant: str, block_size: int, chain: Sequence[int]) -> None:
        """Keys are copied: a chain is many times as large."""
        if chain:
            self._latest.append((tenant, block_size, array("Q", chain[:MOST_BLOCKS])))
            self._count += 1

    def take(self) -> tuple[Sequence[tuple[str, int, "array[int]"]], float]:
        """Removes and returns the latest prompts, and how many of all each of them stands for."""
        taken, weight = list(self._latest), self._count / max(1, len(self._latest))
        self._latest.clear()
        self._count = 0
        return taken, weight
