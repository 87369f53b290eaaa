"""Fingerprints of the requests that no router of the fleet admits until they expire. Pure: time is passed in."""

from collections.abc import Mapping

from trunkline_router.quotas.store import MAX_CONVICTIONS

CONVICTION_MS = 3_600_000  # lifetime of a new conviction; those of other routers arrive with less


class Convictions:
    """This router's convictions and those received from other routers. It keeps at most MAX_CONVICTIONS: first its own,
    then those that expire last."""

    def __init__(self) -> None:
        self._ends: dict[bytes, float] = {}  # expiry in ms, by fingerprint
        self._own: set[bytes] = set()
        self._last_end_ms = 0.0
        self.has_new = False  # whether it has made any that the store was not told

    def add(self, fingerprint: bytes, now_ms: float, ttl_ms: int = CONVICTION_MS) -> None:
        """Adds a conviction by this router."""
        self._ends[fingerprint] = now_ms + ttl_ms
        self._own.add(fingerprint)
        self.has_new = True
        self._bound()

    def hold_any(self, now_ms: float) -> bool:
        """Whether any conviction is in force."""
        return now_ms < self._last_end_ms

    def holds(self, fingerprint: bytes, now_ms: float) -> bool:
        """Whether the request with this fingerprint is convicted."""
        return self._ends.get(fingerprint, 0.0) > now_ms

    def next_report(self, now_ms: float, *, is_beat: bool, everything: bool = False) -> dict[bytes, int]:
        """Returns the ms to live of what the store is told: convictions in force that this router has made, as soon as
        there is a new one, and at beats because the store may have lost some. everything: of all in force."""
        is_due, self.has_new = is_beat or self.has_new, False
        if not is_due:
            return {}
        ends = self._ends if everything else {fingerprint: self._ends[fingerprint] for fingerprint in self._own}
        return {fingerprint: int(end_ms - now_ms) for fingerprint, end_ms in ends.items() if end_ms > now_ms}

    def num_in_force(self, now_ms: float) -> int:
        """How many there are, wherever they come from."""
        return sum(end_ms > now_ms for end_ms in self._ends.values())

    def hear(self, received: Mapping[bytes, int], now_ms: float) -> None:
        """Takes in the store's convictions with their ms to live."""
        heard = {fingerprint: now_ms + ttl_ms for fingerprint, ttl_ms in received.items()}
        self._ends = {fingerprint: end for fingerprint, end in self._ends.items() if end > now_ms} | heard
        self._bound()

    def _bound(self) -> None:
        if len(self._ends) > MAX_CONVICTIONS:
            own = self._own
            by_end = sorted(self._ends.items(), key=lambda item: (item[0] in own, item[1]), reverse=True)
            self._ends = dict(by_end[:MAX_CONVICTIONS])
        self._own &= self._ends.keys()
        self._last_end_ms = max(self._ends.values(), default=0.0)
