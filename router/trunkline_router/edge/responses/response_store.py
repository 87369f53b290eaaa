"""Responses that clients may retrieve and continue. They are kept in this process's memory alone, because prompts and
outputs must not be written anywhere."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from sys import getsizeof
from typing import NamedTuple

from trunkline.v1.inference_pb2 import ChatMessage

TENANT_PART = 4  # a tenant uses at most one part in so many of the memory, so it cannot push out all others' responses
ENTRY_BYTES = 1 << 10  # of a response in addition to its texts
MESSAGE_BYTES = 1 << 10  # of a message or a part of one in addition to its text
EXPIRE_EVERY_S = 10.0  # how long an expired response may stay in memory; it is not found from the moment it expires


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response and the conversation that it ends.

    body: the response object, as JSON
    conversation: all messages up to and including the response, but no instructions. They are shared with the earlier
        responses that it continues, and counted in full, so the count of bytes is an upper bound
    cut_off: ids of the response's calls that are not part of the conversation
    """

    body: bytes = field(repr=False)  # tracebacks are logged, and prompts and outputs must not be
    conversation: tuple[ChatMessage, ...] = field(repr=False)
    cut_off: frozenset[str] = field(repr=False, default=frozenset())

    @property
    def size_bytes(self) -> int:
        """The memory that it takes at most."""
        messages = sum(MESSAGE_BYTES * (1 + len(message.parts)) + message.ByteSize() for message in self.conversation)
        return ENTRY_BYTES + getsizeof(self.body) + messages + MESSAGE_BYTES * len(self.cut_off)


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """max_responses: of each tenant;  max_bytes: of all tenants together;  ttl_s: how long a response is kept"""

    max_responses: int
    max_bytes: int
    ttl_s: float


class _Entry(NamedTuple):
    expires_s: float
    response: StoredResponse


class ResponseStore:
    """The stored responses of all tenants. Each belongs to its tenant: others do not find it.

    Beyond a limit of its tenant, the tenant's oldest response goes; beyond the limit on the memory of all, the oldest.

    clock_s: a clock that never goes back, in seconds
    num_bytes: the memory that the responses take at most
    """

    def __init__(self, limits: StoreLimits, clock_s: Callable[[], float]) -> None:
        self.num_bytes = 0
        self._limits = limits
        self._clock_s = clock_s
        self._entries: dict[tuple[str, str], _Entry] = {}  # by tenant and id, oldest first
        self._sizes: dict[str, dict[str, int]] = {}  # in bytes, by tenant and by id, oldest first

    def put(self, tenant: str, response_id: str, response: StoredResponse) -> bool:
        """Stores a new response. Returns whether it fits: one that is larger than its tenant's limit is not stored."""
        size, limits = response.size_bytes, self._limits
        max_tenant_bytes = limits.max_bytes // TENANT_PART
        self.expire()
        if size > max_tenant_bytes or not limits.max_responses:
            return False
        sizes = self._sizes.setdefault(tenant, {})
        sizes[response_id] = size
        self.num_bytes += size
        self._entries[tenant, response_id] = _Entry(self._clock_s() + limits.ttl_s, response)
        while len(sizes) > limits.max_responses or sum(sizes.values()) > max_tenant_bytes:
            self.delete(tenant, next(iter(sizes)))
        while self.num_bytes > limits.max_bytes:
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
        sizes = self._sizes[tenant]
        self.num_bytes -= sizes.pop(response_id)
        if not sizes:
            del self._sizes[tenant]
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
