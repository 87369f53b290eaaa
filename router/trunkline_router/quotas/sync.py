"""The exchange between a router and the store: what the router reports, when, and how it uses the replies.

A router syncs every 5 to 20 ms while something changes, else once a second (a beat). A store that turns out to be empty
or new is told everything, once.

Other routers' credits are worth most in the milliseconds before workers report the requests themselves, and cost more
with each worker and router: so a router rests for ten times as long as a sync took. bench/log.md has the measurements.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from trunkline_router.quotas.admission import top_up
from trunkline_router.quotas.convictions import Convictions
from trunkline_router.quotas.fairness import Served
from trunkline_router.quotas.fleet import Neighbours, PoolFleet
from trunkline_router.quotas.reservation import Reservation
from trunkline_router.quotas.store import TTL_MS, Report, StoreDown, SyncReply, WorkerKey
from trunkline_router.quotas.store_link import StoreLink
from trunkline_router.quotas.tenant_book import QuotaBook
from trunkline_router.routing.credit import Credit

LEAST_REST_S, MOST_REST_S = 0.005, 0.020
REST_TIMES = 10  # the rest after a tick, in multiples of its duration
BEAT_S = 1.0

Own = tuple[Mapping[WorkerKey, Credit], Sequence[str]]  # credits, and tenants with open requests


class OwnState:
    """What a router has to share, and what it has received.

    running: open reservations by tenant
    """

    def __init__(self, fleet: PoolFleet, window_ms: int) -> None:
        self.fleet = fleet
        self.book = QuotaBook(window_ms)
        self.running: dict[str, set[Reservation]] = {}
        self.served = Served()
        self.convictions = Convictions()  # on the clock of steady_s
        self.neighbours = Neighbours()

    def count_running(self, now_ms: float) -> None:
        """Counts what was computed for running requests."""
        for reservations in self.running.values():
            for reservation in reservations:
                self.served.add(reservation.tenant, reservation.new_service())
                if reservation.admitted is not None:
                    top_up(self.book, reservation.admitted, reservation.meter.tokens, now_ms)

    def forget_idle(self, now_ms: float) -> None:
        """Without a store: drops what no longer counts, and takes this router's service for the fleet's."""
        self.book.next_report(now_ms, is_beat=True)
        self.book.forget_idle(now_ms)
        self.served.count_alone(now_ms)


def rest_s(took_s: float) -> float:
    """Returns how long to wait after a tick that took `took_s`."""
    return min(MOST_REST_S, max(LEAST_REST_S, REST_TIMES * took_s))


class Sync:
    """Syncs a router's state with the store.

    steady_s: returns the time of a monotonic clock
    """

    def __init__(self, state: OwnState, link: StoreLink, steady_s: Callable[[], float]) -> None:
        self._state = state
        self._link = link
        self._steady_s = steady_s
        self._pending: Report | None = None  # sent, and possibly counted
        self._number = 0
        self._last_sent: Own = {}, ()
        self._versions: tuple[int | None, int | None] = (None, None)  # of leases and convictions
        self._beat_at_s = 0.0
        self._heard_at_s = 0.0
        self._read_s = 0.0  # time on reading the last reply
        self.rest_s = MOST_REST_S  # until the next tick

    async def tick(self) -> None:
        """Syncs if there is something to report, or a beat is due."""
        began_s = self._steady_s()
        is_beat = began_s >= self._beat_at_s or self._link.has_lost_state
        own = self._own(is_beat)
        has_changes = self._pending is not None or self._state.book.has_changes or self._state.convictions.has_new
        if is_beat or has_changes or own != self._last_sent:
            await self._link.use(partial(self._exchange, own, is_beat))
        self.rest_s = rest_s(self._steady_s() - began_s) if len(self._state.neighbours) else MOST_REST_S
        # Whatever the store holds, reading it takes at most this share of the loop's time.
        self.rest_s = max(self.rest_s, min(BEAT_S, REST_TIMES * self._read_s))
        self._read_s = 0.0

    async def beat(self) -> None:
        """Syncs at once, with all that changed before and all that does not. Raises StoreDown."""
        if self._pending is not None:
            await self._exchange(self._last_sent, is_beat=False)
        await self._exchange(self._own(is_beat=True), is_beat=True)

    def beat_next(self) -> None:
        """Makes the next tick a beat."""
        self._beat_at_s = 0.0

    def forget_silent(self) -> None:
        """Drops the other routers' reports once the store has been silent for too long."""
        if len(self._state.neighbours) and self._steady_s() - self._heard_at_s > TTL_MS / 1e3:
            self._forget_others()

    async def _exchange(self, own: Own, is_beat: bool) -> None:
        """Raises StoreDown."""
        if self._pending is None:
            self._pending = self._report(own, self._link.life, is_beat=is_beat)
        report = self._pending = replace(self._pending, sent_ms=self._now_ms())
        reply = await self._link.store.sync(report)
        if reply.life != report.life:
            self._link.life = ""  # the store is not asked for requests until it knows everything
            self._forget_others()
            self._versions = None, None
            self._link.entries += 1
            self._pending = report = self._report(self._own(is_beat=True), reply.life, is_beat=True, everything=True)
            reply = await self._link.store.sync(report)
            if reply.life != report.life:
                raise StoreDown("the store was lost again while it was told everything")
        self._pending = None
        self._link.life = reply.life
        self._link.syncs += 1
        self._heard_at_s = self._steady_s()
        self._take(reply)

    def _report(self, own: Own, life: str, *, is_beat: bool, everything: bool = False) -> Report:
        """Returns what to report, and marks it as reported. `everything`: the store knows nothing of this router."""
        now_ms = self._now_ms()
        self._number += 1
        if is_beat:
            self._link.has_lost_state = False
            self._beat_at_s = self._steady_s() + BEAT_S
            self._state.count_running(now_ms)
            self._state.book.forget_idle(now_ms)
        before, self._last_sent = self._last_sent, own
        return Report(
            router=self._link.name,
            life=life,
            number=self._number,
            sent_ms=now_ms,
            tenants=self._state.book.next_report(now_ms, is_beat=is_beat, everything=everything),
            served=self._state.served.changes(),
            credits=own[0] if is_beat or own != before else None,
            competing=own[1],
            leases=self._state.fleet.leases() if is_beat else None,
            convictions=self._state.convictions.next_report(now_ms, is_beat=is_beat, everything=everything),
            known=self._state.neighbours.versions,
            known_leases=self._versions[0],
            known_convictions=self._versions[1],
            wants_served=is_beat,
        )

    def _take(self, reply: SyncReply) -> None:
        if self._state.neighbours.hear(reply):
            self._state.fleet.take_credits(self._state.neighbours.credits())
        if reply.leases is not None:
            self._state.fleet.take_leases(reply.leases)
        if reply.convictions is not None:
            self._state.convictions.hear(reply.convictions, self._now_ms())
        if reply.served is not None:
            self._state.served.fleet = reply.served
        self._read_s = reply.read_s
        self._versions = reply.leases_version, reply.convictions_version

    def _forget_others(self) -> None:
        self._state.neighbours.forget()
        self._state.fleet.take_credits({})

    def _own(self, is_beat: bool) -> Own:
        """Returns what it has open now. Without other routers it is computed for beats only."""
        if not is_beat and not len(self._state.neighbours):
            return self._last_sent
        return self._state.fleet.credits(), sorted(self._state.running)

    def _now_ms(self) -> float:
        return self._steady_s() * 1e3
