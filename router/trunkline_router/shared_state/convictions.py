"""Requests that no router of the fleet admits any more, by fingerprint, each until its end. Pure: time is passed in."""

from collections.abc import Mapping

from trunkline_router.shared_state.store import MAX_CONVICTIONS

CONVICTION_MS = 3_600_000  # of one that this router comes to; others' have less left when it hears of them


class Convictions:
    """This router's, and those that it has heard of."""

    def __init__(self) -> None:
        self._ends: dict[bytes, float] = {}  # ms
        self._last_end_ms = 0.0
        self._new: dict[bytes, int] = {}  # ms to live, of those that the store does not know yet

    @property
    def has_news(self) -> bool:
        return bool(self._new)

    def add(self, fingerprint: bytes, now_ms: float, ttl_ms: int = CONVICTION_MS) -> None:
        """This router's own."""
        self._ends[fingerprint] = now_ms + ttl_ms
        self._new[fingerprint] = ttl_ms
        self._bound()

    def hold_any(self, now_ms: float) -> bool:
        return now_ms < self._last_end_ms

    def holds(self, fingerprint: bytes, now_ms: float) -> bool:
        return self._ends.get(fingerprint, 0.0) > now_ms

    def changes(self) -> dict[bytes, int]:
        """What the store does not know yet; it is taken as told from here on."""
        new, self._new = self._new, {}
        return new

    def everything(self, now_ms: float) -> dict[bytes, int]:
        """All that are in force, for a store that knows none; they are taken as told from here on."""
        self._new = {}
        return {fingerprint: int(end_ms - now_ms) for fingerprint, end_ms in self._ends.items() if end_ms > now_ms}

    def hear(self, told: Mapping[bytes, int], now_ms: float) -> None:
        """What the store knows, with the time that is left."""
        heard = {fingerprint: now_ms + ttl_ms for fingerprint, ttl_ms in told.items()}
        self._ends = {fingerprint: end for fingerprint, end in self._ends.items() if end > now_ms} | heard
        self._bound()

    def _bound(self) -> None:
        if len(self._ends) > MAX_CONVICTIONS:
            by_end = sorted(self._ends.items(), key=lambda item: item[1], reverse=True)
            self._ends = dict(by_end[:MAX_CONVICTIONS])
        self._last_end_ms = max(self._ends.values(), default=0.0)
