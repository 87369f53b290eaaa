"""One attack, its victims and the innocent tenant, and what is measured of them meanwhile."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trunkline_bench.attacks.blow import Blow
from trunkline_bench.attacks.catalogue import NONE, Case, Section
from trunkline_bench.attacks.innocent import Innocent
from trunkline_bench.attacks.neighbour import Neighbour
from trunkline_bench.attacks.row import Row
from trunkline_bench.attacks.server import Server
from trunkline_bench.attacks.vectors.false_worker import ASKED
from trunkline_bench.attacks.window import Window

LOOK_S = 0.02
REST_S = 3.0  # after the attack, in which memory must fall back
LIE_S = 1.0  # more than other attacks: a worker's description is only the first thing that it says


@dataclass(frozen=True, slots=True)
class Scene:
    """`victim` is the server whose memory and loop are watched; `target` is the address that the attacker is given."""

    case: Case
    innocent: Innocent
    victim: Server
    target: str
    router: Server
    workers: Sequence[Server]
    neighbour: Neighbour | None

    async def measure(self, row: Row, window: Window) -> None:
        """Runs the attack and fills in its row. Raises FleetError."""
        victim, kept_mib = self.victim, row.bounds.kept_mib
        row.rss_before = victim.rss_mib()
        began_s = time.monotonic()
        watching = asyncio.create_task(self._most_memory(row))
        try:
            await self._attack(window, row)
            ended_s = time.monotonic()
            for _ in range(round(REST_S / LOOK_S)):
                if victim.rss_mib() - row.rss_before <= kept_mib:
                    break
                await asyncio.sleep(LOOK_S)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        row.rss_after = victim.rss_mib()
        row.lag = victim.lag(began_s, ended_s)

    async def _attack(self, window: Window, row: Row) -> None:
        """The attack from its first blow to its last one. It goes on until the innocent's last request has ended."""
        case, neighbour, record = self.case, self.neighbour, row.record
        if case.attack == NONE:
            await self.innocent.ask_for(window, record)
        elif case.section is Section.LIAR:
            assert neighbour is not None
            await neighbour.start()
            asked = asyncio.create_task(neighbour.process.wait_for(ASKED))
            await self.innocent.ask_while(lambda: not asked.done(), record)
            await asked
            await self.innocent.ask_for(replace(window, least_s=LIE_S + window.least_s), record)
            row.outcomes = await neighbour.as_told_by(self.router)
        else:
            blow = Blow(case.attack, self.target, window.most_s)
            try:
                await blow.begins()
                await self.innocent.ask_for(window, record)
                outcomes = await blow.end()
            finally:
                await blow.stop()
            if case.section is Section.NAMESAKE:
                outcomes["workers lost"] = sum(worker.ends for worker in self.workers)
            row.outcomes = ", ".join(f"{count:,} {name}" for name, count in outcomes.items() if count)
            if case.bounds.statuses:
                row.strange_statuses = tuple(name for name in outcomes if name not in case.bounds.statuses)

    async def _most_memory(self, row: Row) -> None:
        while True:
            row.rss_peak = max(row.rss_peak, self.victim.rss_mib())
            await asyncio.sleep(LOOK_S)
