"""Who may call what only routers and operators should: those who have the worker's grant key, where it has one."""

from collections.abc import Callable, Iterable

from trunkline.proof import check_proof
from trunkline.status import RequestRefused
from trunkline_runtime.log import get_logger

QUIET_MS = 60_000  # between two lines on refused calls: whoever reaches the worker can make as many as it likes


class CallAuthorizer:
    """`key`: empty where everybody may. `now_unix_ms`: the time that proofs are made at."""

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
        """Raises RequestRefused (UNAUTHENTICATED)."""
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
