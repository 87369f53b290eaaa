"""Responses that clients may retrieve and continue. They are kept in this process's memory alone, because prompts and
outputs must not be written anywhere."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from sys import getsizeof
from typing import NamedTuple

TENANT_PART = 4  # a tenant uses at most one part in so many of the memory, so it cannot push out all others' responses
ENTRY_BYTES = 1 << 10  # of a response in addition to its texts
TURN_BYTES = 128  # of a message in addition to its text
EXPIRE_EVERY_S = 10.0  # how long an expired response may stay in memory; it is not found from the moment it expires


class Turn(NamedTuple):
    """A message of a conversation."""

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response and the conversation that it ends.

    body: the response object, as JSON
    conversation: all messages up to and including the response, but no instructions. Texts are shared with the earlier
        responses that it continues, and counted in full, so the count of bytes is an upper bound
    """

    body: bytes = field(repr=False)  # tracebacks are logged, and prompts and outputs must not be
    conversation: tuple[Turn, ...] = field(repr=False)

    @property
    def size_bytes(self) -> int:
        """The memory that it takes at most."""
        texts = sum(TURN_BYTES + getsizeof(turn.text) for turn in self.conversation)
        return ENTRY_BYTES + getsizeof(self.body) + texts


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """max_responses: of each tenant;  max_bytes: of all tenants together;  ttl_s: how long a response is kept"""

    max_responses: int
    max_bytes: int
    ttl_s: float

    @property
    def max_tenant_bytes(self) -> int:
        """The memory that one tenant's responses may take."""
        return self.max_bytes // TENANT_PART


class _Entry(NamedTuple):
    expires_s: float
    size_bytes: int
    response: StoredResponse


@dataclass(slots=True)
class _Holding:
    """What one tenant has in the store."""

    ids: dict[str, None] = field(default_factory=dict)  # oldest first
    num_bytes: int = 0


class ResponseStore:
    """The stored responses of all tenants. Each belongs to its tenant: others do not find it.

    Beyond a limit of its tenant, the tenant's oldest response goes; beyond the limit on the memory of all, the oldest.

    clock_s: a clock that never goes back, in seconds
    """

    def __init__(self, limits: StoreLimits, clock_s: Callable[[], float]) -> None:
        self._limits = limits
        self._clock_s = clock_s
        self._entries: dict[tuple[str, str], _Entry] = {}  # by tenant and id, oldest first
        self._holdings: dict[str, _Holding] = {}  # by tenant
        self._num_bytes = 0

    def __len__(self) -> int:
        """The number of responses in memory."""
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        """The memory that the responses take at most."""
        return self._num_bytes

    def put(self, tenant: str, response_id: str, response: StoredResponse) -> bool:
        """Stores a new response. Returns whether it fits: one that is larger than its tenant's limit is not stored."""
        size = response.size_bytes
        limits = self._limits
        self.expire()
        if size > limits.max_tenant_bytes or not limits.max_responses:
            return False
        holding = self._holdings.setdefault(tenant, _Holding())
        holding.ids[response_id] = None
        holding.num_bytes += size
        self._num_bytes += size
        self._entries[tenant, response_id] = _Entry(self._clock_s() + limits.ttl_s, size, response)
        while len(holding.ids) > limits.max_responses or holding.num_bytes > limits.max_tenant_bytes:
            self.delete(tenant, next(iter(holding.ids)))
        while self._num_bytes > limits.max_bytes:
            self.delete(*next(iter(self._entries)))
        return True

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """Returns a response of the tenant; None if it has no such response, or no longer."""
        entry = self._entries.get((tenant, response_id))
        return None if entry is None or self._clock_s() >= entry.expires_s else entry.response

    def delete(self, tenant: str, response_id: str) -> bool:
        """Removes a response of the tenant. Returns whether the tenant had it."""
        entry = self._entries.pop((tenant, response_id), None)
        if entry is None:
            return False
        holding = self._holdings[tenant]
        del holding.ids[response_id]
        holding.num_bytes -= entry.size_bytes
        self._num_bytes -= entry.size_bytes
        if not holding.ids:
            del self._holdings[tenant]
        return self._clock_s() < entry.expires_s

    def expire(self) -> None:
        """Removes the responses that are too old."""
        now_s = self._clock_s()
        while self._entries:
            key, entry = next(iter(self._entries.items()))
            if now_s < entry.expires_s:
                return
            self.delete(*key)

    async def run(self) -> None:
        """Removes responses as they expire, until it is cancelled."""
        while True:
            await asyncio.sleep(EXPIRE_EVERY_S)
            self.expire()

    def check_integrity(self) -> None:
        """Raises AssertionError if the counts do not agree."""
        assert self._num_bytes == sum(entry.size_bytes for entry in self._entries.values())
        assert self._num_bytes == sum(holding.num_bytes for holding in self._holdings.values())
        held = {(tenant, name) for tenant, holding in self._holdings.items() for name in holding.ids}
        assert held == set(self._entries)
        assert all(holding.ids for holding in self._holdings.values())
