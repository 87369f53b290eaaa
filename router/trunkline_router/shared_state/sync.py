"""The protocol between a router and the store: what it says, when, and what it makes of what the others said.

Every 5 to 20 ms while there is news, once a second (a beat) where there is none. A store that turns out empty, or new,
is told everything, once.

What others have sent is worth most in the milliseconds before workers report it, and costs more with each worker and
router: so a router rests for ten times as long as it took to tell and hear. bench/log.md has what that brings.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from trunkline_router.routing.credit import Credit
from trunkline_router.shared_state.fleet import Fleet
from trunkline_router.shared_state.neighbours import Neighbours
from trunkline_router.shared_state.quota_book import QuotaBook
from trunkline_router.shared_state.served import Served
from trunkline_router.stores.convictions import Convictions
from trunkline_router.stores.store import MAX_CONVICTIONS, TTL_MS, Report, StoreDown, SyncReply, WorkerKey
from trunkline_router.stores.store_link import StoreLink

LEAST_REST_S, MOST_REST_S = 0.005, 0.020
REST_TIMES = 10  # as long as a tick took
BEAT_S = 1.0

Own = tuple[Mapping[WorkerKey, Credit], Sequence[str]]  # credits, and tenants with open requests


def rest_s(took_s: float) -> float:
    """How long to wait after a tick that took so long."""
    return min(MOST_REST_S, max(LEAST_REST_S, REST_TIMES * took_s))


class Sync:
    """See the module.

    open_tenants: those with running requests here
    on_entry: called before a store is told everything
    steady_s: a clock
    """

    def __init__(
        self,
        link: StoreLink,
        fleet: Fleet,
        book: QuotaBook,
        *,
        open_tenants: Collection[str],
        on_entry: Callable[[], None],
        steady_s: Callable[[], float],
    ) -> None:
        self._link = link
        self._fleet = fleet
        self._book = book
        self._open_tenants = open_tenants
        self._on_entry = on_entry
        self._steady_s = steady_s
        self.neighbours = Neighbours()
        self.convictions = Convictions()  # their clock is this one's
        self.served = Served()
        self._pending: Report | None = None  # sent, and perhaps counted
        self._pending_as_of_ms = 0.0
        self._number = 0
        self._told: Own = {}, ()
        self._versions: tuple[int | None, int | None] = (None, None)  # of leases and convictions
        self._beat_at_s = 0.0
        self._heard_at_s = 0.0
        self._read_s = 0.0  # that the last news took
        self.rest_s = MOST_REST_S  # until the next tick
        self.times = 0  # that it has succeeded

    async def tick(self) -> None:
        """Tells and hears, where there is anything to tell or the time has come."""
        began_s = self._steady_s()
        is_beat = began_s >= self._beat_at_s
        own = self._own(is_beat)
        has_changes = self._pending is not None or self._book.has_changes or self.convictions.has_changes
        if is_beat or has_changes or own != self._told:
            await self._link.use(partial(self._exchange, own, is_beat))
        self.rest_s = rest_s(self._steady_s() - began_s) if len(self.neighbours) else MOST_REST_S
        # Whatever lies in the store, reading it takes no more than this share of the loop's time.
        self.rest_s = max(self.rest_s, min(BEAT_S, REST_TIMES * self._read_s))
        self._read_s = 0.0

    async def beat(self) -> None:
        """Tells and hears, whatever there is. Raises StoreDown."""
        await self._exchange(self._own(is_beat=True), is_beat=True)

    def beat_next(self) -> None:
        """The next tick is a beat: then a store that has lost what it knew hears everything."""
        self._beat_at_s = 0.0

    def forget_silent(self) -> None:
        """What others had in flight when they were last heard says nothing after a while."""
        if len(self.neighbours) and self._is_forgotten:
            self._forget_others()

    async def _exchange(self, own: Own, is_beat: bool) -> None:
        """Raises StoreDown."""
        now_ms = self._now_ms()
        if self._pending is None:
            self._pending = self._report(own, self._link.life, is_beat=is_beat)
        else:  # perhaps it was counted; if not, it is older now
            self._pending = self._pending.aged(int(now_ms - self._pending_as_of_ms))
        self._pending_as_of_ms = now_ms
        report = self._pending
        reply = await self._link.store.sync(report)
        if reply.life != report.life:
            self._link.life = ""  # until it knows everything it is not asked
            self._forget_others()
            self._versions = None, None
            self._on_entry()
            self._pending = report = self._report(self._own(is_beat=True), reply.life, is_beat=True, everything=True)
            reply = await self._link.store.sync(report)
            if reply.life != report.life:
                raise StoreDown("the store was lost again while it was told everything")
        self._pending = None
        self._link.life = reply.life
        self.times += 1
        self._heard_at_s = self._steady_s()
        self._take(reply)

    def _report(self, own: Own, life: str, *, is_beat: bool, everything: bool = False) -> Report:
        """What it says now, and takes as told. `everything`: to a store that knows nothing of this router."""
        now_ms = self._now_ms()
        self._number += 1
        if is_beat:
            self._beat_at_s = self._steady_s() + BEAT_S
            self._book.forget_idle(now_ms)
        if everything:
            windows, served = self._book.everything(now_ms), self.served.everything(now_ms)
            convictions = self.convictions.everything(now_ms)
        else:
            windows, served = self._book.changes(now_ms), self.served.changes(now_ms)
            convictions = self.convictions.changes()
        before, self._told = self._told, own
        is_unsaid = everything or own != before or self._is_forgotten
        return Report(
            router=self._link.name,
            life=life,
            number=self._number,
            windows=windows,
            in_flight=self._book.in_flight(all_of_them=is_beat),
            served=served,
            credits=own[0] if is_unsaid else None,
            competing=own[1],
            leases=self._fleet.leases() if is_beat else None,
            convictions=convictions,
            known=self.neighbours.versions,
            known_leases=self._versions[0],
            known_convictions=self._versions[1],
            wants_served=is_beat,
        )

    def _take(self, reply: SyncReply) -> None:
        if self.neighbours.hear(reply):
            self._fleet.take_credits(self.neighbours.credits())
        if reply.leases is not None:
            self._fleet.take_leases(reply.leases)
        if reply.convictions is not None:
            self.convictions.hear(reply.convictions, self._now_ms())
        if reply.served is not None:
            self.served.fleet = reply.served
        self._read_s = reply.read_s
        self._versions = reply.leases_version, reply.convictions_version
        is_beat = reply.served is not None
        if is_beat and reply.convictions_count < min(self.convictions.count(self._now_ms()), MAX_CONVICTIONS):
            self._versions = reply.leases_version, None  # it has lost some: they are compared with the next news

    def _forget_others(self) -> None:
        self.neighbours.forget()
        self._fleet.take_credits({})

    @property
    def _is_forgotten(self) -> bool:
        """Whether it was silent for so long that it is taken for dead, and what it had open for gone."""
        return self._steady_s() - self._heard_at_s > TTL_MS / 1e3

    def _own(self, is_beat: bool) -> Own:
        """What it has open now. Alone, as far as it knows, it looks at that for beats only: nobody would hear it."""
        if not is_beat and not len(self.neighbours):
            return self._told
        return self._fleet.credits(), sorted(self._open_tenants)

    def _now_ms(self) -> float:
        return self._steady_s() * 1e3
