"""Accepts requests of direct clients: with a router's grant if the worker has a grant key, else without."""

from collections.abc import Callable
from heapq import heappop, heappush

from trunkline.grant import GrantKeys, forbidden, open_grant
from trunkline.status import CODE_RESOURCE_EXHAUSTED, OVERLOADED, RequestRefused, invalid
from trunkline.v1.worker_pb2 import Grant, Submit, WorkerServiceGenerateRequest

MAX_REMEMBERED = 1 << 17  # used grants: 4,000 a second over the time for which they are valid, about 25 MB


class UsedGrants:
    """Remembers used grants until they expire. At `most` grants it refuses new ones, rather than forget old ones."""

    def __init__(self, most: int = MAX_REMEMBERED) -> None:
        self._most = most
        self._signatures: set[bytes] = set()
        self._by_expiry: list[tuple[int, bytes]] = []  # a heap

    def __len__(self) -> int:
        return len(self._signatures)

    def use(self, grant: Grant, now_unix_ms: int) -> None:
        """Marks an opened grant as used. Raises RequestRefused: FORBIDDEN if it was used before, OVERLOADED at
        `most`."""
        while self._by_expiry and self._by_expiry[0][0] <= now_unix_ms:
            self._signatures.discard(heappop(self._by_expiry)[1])
        if grant.signature in self._signatures:
            raise forbidden("the grant was used already")
        if len(self._signatures) >= self._most:
            wait_ms = self._by_expiry[0][0] - now_unix_ms
            message = "this worker was given too many grants recently"
            raise RequestRefused(CODE_RESOURCE_EXHAUSTED, OVERLOADED, message, retry_delay_ms=wait_ms)
        self._signatures.add(grant.signature)
        heappush(self._by_expiry, (grant.expires_unix_ms, grant.signature))


class GrantDesk:
    """Checks the requests of direct clients. `keys`: the grant keys; if there are none, the worker trusts every caller
    that the door admits, and accepts requests without a grant only. `now_unix_ms`: the clock by which grants expire."""

    def __init__(self, keys: GrantKeys, epoch: int, now_unix_ms: Callable[[], int]) -> None:
        self._keys = keys
        self._epoch = epoch
        self._now_unix_ms = now_unix_ms
        self._used = UsedGrants()

    def take(self, request: WorkerServiceGenerateRequest) -> Submit:
        """Returns the request's submit, and uses up its grant.

        Raises RequestRefused: FORBIDDEN if the grant is missing, not expected, invalid or used, OVERLOADED if too many
        are remembered, INVALID_REQUEST if a submit accompanies the grant.
        """
        if not self._keys:
            if request.HasField("grant"):
                raise forbidden("this worker takes no grants: it was started without --grant-key")
            submit = Submit()
            submit.CopyFrom(request.submit)
            return submit
        if not request.HasField("grant"):
            raise forbidden("this worker takes requests with a router's grant only")
        if request.HasField("submit"):
            raise invalid("submit", "must not be set together with a grant, which contains it")
        now_unix_ms = self._now_unix_ms()
        submit = open_grant(self._keys, request.grant, epoch=self._epoch, now_unix_ms=now_unix_ms)
        self._used.use(request.grant, now_unix_ms)
        return submit
