"""Requests that no router of the fleet admits any more, by fingerprint, each until its end. Pure: time is passed in."""

from collections.abc import Mapping

from trunkline_router.stores.store import MAX_CONVICTIONS

CONVICTION_MS = 3_600_000  # of one that this router comes to; others' have less left when it hears of them


SAID_AGAIN_MS = 1_000  # what the store has lost is not worth saying again in its last second


class Convictions:
    """This router's, and those that it has heard of. At most MAX_CONVICTIONS: its own before others', then those that
    live longest."""

    def __init__(self) -> None:
        self._ends: dict[bytes, float] = {}  # ms
        self._own: set[bytes] = set()
        self._last_end_ms = 0.0
        self._new: dict[bytes, int] = {}  # ms to live, of those that the store does not know yet

    @property
    def has_news(self) -> bool:
        return bool(self._new)

    def add(self, fingerprint: bytes, now_ms: float, ttl_ms: int = CONVICTION_MS) -> None:
        """This router's own."""
        self._ends[fingerprint] = now_ms + ttl_ms
        self._own.add(fingerprint)
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

    def count(self, now_ms: float) -> int:
        """Those that the store should know."""
        return sum(end_ms > now_ms + SAID_AGAIN_MS for end_ms in self._ends.values())

    def hear(self, told: Mapping[bytes, int], now_ms: float) -> None:
        """What the store knows, with the time that is left. What it has lost is news to it, while it has room."""
        heard = {fingerprint: now_ms + ttl_ms for fingerprint, ttl_ms in told.items()}
        if len(told) < MAX_CONVICTIONS:
            for fingerprint, end_ms in self._ends.items():
                if fingerprint not in heard and end_ms > now_ms + SAID_AGAIN_MS:
                    self._new[fingerprint] = int(end_ms - now_ms)
        self._ends = {fingerprint: end for fingerprint, end in self._ends.items() if end > now_ms} | heard
        self._bound()

    def _bound(self) -> None:
        if len(self._ends) > MAX_CONVICTIONS:
            own = self._own
            by_end = sorted(self._ends.items(), key=lambda item: (item[0] in own, item[1]), reverse=True)
            self._ends = dict(by_end[:MAX_CONVICTIONS])
        self._own &= self._ends.keys()
        self._last_end_ms = max(self._ends.values(), default=0.0)
