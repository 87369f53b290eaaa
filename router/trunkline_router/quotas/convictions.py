"""Fingerprints of the requests that no router of the fleet admits until they expire. Pure: time is passed in."""

from collections.abc import Mapping

from trunkline_router.quotas.store import MAX_CONVICTIONS

CONVICTION_MS = 3_600_000  # lifetime of a new conviction; those of other routers arrive with less
MIN_RESEND_MS = 1_000  # a conviction that the store has lost is not sent again in its last second


class Convictions:
    """This router's convictions and those received from other routers. It keeps at most MAX_CONVICTIONS: first its own,
    then those that expire last."""

    def __init__(self) -> None:
        self._ends: dict[bytes, float] = {}  # expiry in ms, by fingerprint
        self._own: set[bytes] = set()
        self._last_end_ms = 0.0
        self._new: dict[bytes, int] = {}  # ms to live of those that the store does not know yet

    @property
    def has_changes(self) -> bool:
        """Whether there are convictions that the store does not know."""
        return bool(self._new)

    def add(self, fingerprint: bytes, now_ms: float, ttl_ms: int = CONVICTION_MS) -> None:
        """Adds a conviction by this router."""
        self._ends[fingerprint] = now_ms + ttl_ms
        self._own.add(fingerprint)
        self._new[fingerprint] = ttl_ms
        self._bound()

    def hold_any(self, now_ms: float) -> bool:
        """Whether any conviction is in force."""
        return now_ms < self._last_end_ms

    def holds(self, fingerprint: bytes, now_ms: float) -> bool:
        """Whether the request with this fingerprint is convicted."""
        return self._ends.get(fingerprint, 0.0) > now_ms

    def changes(self) -> dict[bytes, int]:
        """Returns the ms to live of convictions that the store does not know yet, and marks them as sent."""
        new, self._new = self._new, {}
        return new

    def everything(self, now_ms: float) -> dict[bytes, int]:
        """Returns the ms to live of all convictions in force, for an empty store, and marks them as sent."""
        self._new = {}
        return {fingerprint: int(end_ms - now_ms) for fingerprint, end_ms in self._ends.items() if end_ms > now_ms}

    def num_in_force(self, now_ms: float) -> int:
        """How many there are, wherever they come from."""
        return sum(end_ms > now_ms for end_ms in self._ends.values())

    def count(self, now_ms: float) -> int:
        """The number of convictions that the store should have."""
        return sum(end_ms > now_ms + MIN_RESEND_MS for end_ms in self._ends.values())

    def hear(self, received: Mapping[bytes, int], now_ms: float) -> None:
        """Takes in the store's convictions with their ms to live. Those that the store has lost are sent again, if it
        has room."""
        heard = {fingerprint: now_ms + ttl_ms for fingerprint, ttl_ms in received.items()}
        if len(received) < MAX_CONVICTIONS:
            for fingerprint, end_ms in self._ends.items():
                if fingerprint not in heard and end_ms > now_ms + MIN_RESEND_MS:
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
