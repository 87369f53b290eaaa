"""Where requests of direct clients come in: with a router's grant, where the worker has a key for them."""

from collections.abc import Callable
from heapq import heappop, heappush

from trunkline.grant import forbidden, open_grant
from trunkline.status import CODE_RESOURCE_EXHAUSTED, OVERLOADED, RequestRefused, invalid
from trunkline.v1.worker_pb2 import Grant, Submit, WorkerServiceGenerateRequest

MAX_REMEMBERED = 1 << 17  # used grants: 4,000 a second over the time for which they are good, about 25 MB


class UsedGrants:
    """Remembers grants until they expire. Bounded: past `most` of them nothing more is taken, rather than forgotten."""

    def __init__(self, most: int = MAX_REMEMBERED) -> None:
        self._most = most
        self._signatures: set[bytes] = set()
        self._by_expiry: list[tuple[int, bytes]] = []  # a heap

    def __len__(self) -> int:
        return len(self._signatures)

    def use(self, grant: Grant, now_unix_ms: int) -> None:
        """Uses up a grant that was opened. Raises RequestRefused: FORBIDDEN for the second time, OVERLOADED."""
        while self._by_expiry and self._by_expiry[0][0] <= now_unix_ms:
            self._signatures.discard(heappop(self._by_expiry)[1])
        if grant.signature in self._signatures:
            raise forbidden("the grant was used already")
        if len(self._signatures) >= self._most:
            wait_ms = self._by_expiry[0][0] - now_unix_ms
            message = "this worker was given too many grants of late"
            raise RequestRefused(CODE_RESOURCE_EXHAUSTED, OVERLOADED, message, retry_delay_ms=wait_ms)
        self._signatures.add(grant.signature)
        heappush(self._by_expiry, (grant.expires_unix_ms, grant.signature))


class GrantDesk:
    """Where a worker takes requests of direct clients. `key`: empty where it trusts whoever reaches it, and takes
    requests without a grant. `now_unix_ms`: the time that grants expire by."""

    def __init__(self, key: bytes, epoch: int, now_unix_ms: Callable[[], int]) -> None:
        self._key = key
        self._epoch = epoch
        self._now_unix_ms = now_unix_ms
        self._used = UsedGrants()

    def take(self, request: WorkerServiceGenerateRequest) -> Submit:
        """The request's submit; a grant is used up by it. Raises RequestRefused."""
        if not self._key:
            if request.HasField("grant"):
                raise forbidden("this worker takes no grants: it was started without --grant-key")
            submit = Submit()
            submit.CopyFrom(request.submit)
            return submit
        if not request.HasField("grant"):
            raise forbidden("this worker takes requests with a router's grant only")
        if request.HasField("submit"):
            raise invalid("submit", "is given beside a grant, which says everything")
        now_unix_ms = self._now_unix_ms()
        submit = open_grant(self._key, request.grant, epoch=self._epoch, now_unix_ms=now_unix_ms)
        self._used.use(request.grant, now_unix_ms)
        return submit
