"""Restricts calls meant for routers and operators to callers that prove the worker's grant key, if it has one."""

from collections.abc import Callable, Iterable

from trunkline.proof import check_proof
from trunkline.status import RequestRefused
from trunkline_runtime.log import get_logger

QUIET_MS = 60_000  # between two log lines on refused calls, because any host may cause any number of them


class CallAuthorizer:
    """Checks the proofs of calls. `key`: empty if any caller is allowed. `now_unix_ms`: the clock of proofs."""

    def __init__(self, key: bytes, worker_id: str, epoch: int, now_unix_ms: Callable[[], int]) -> None:
        self._key = key
        self._worker_id = worker_id
        self._epoch = epoch
        self._now_unix_ms = now_unix_ms
        self._told_unix_ms: int | None = None

    @property
    def has_key(self) -> bool:
        """Whether callers must prove that they have the key."""
        return bool(self._key)

    def check(self, method: str, metadata: "Iterable[tuple[str, str | bytes]] | None") -> None:
        """Raises RequestRefused (UNAUTHENTICATED) if the metadata has no valid proof for this method."""
        now_unix_ms = self._now_unix_ms()
        try:
            check_proof(
                self._key,
                method,
                metadata,
                worker_id=self._worker_id,
                epoch=self._epoch,
                now_unix_ms=now_unix_ms,
            )
        except RequestRefused as refused:
            if self._told_unix_ms is None or now_unix_ms - self._told_unix_ms >= QUIET_MS:
                self._told_unix_ms = now_unix_ms
                get_logger().warning("call refused", method=method, problem=refused.message)
            raise
