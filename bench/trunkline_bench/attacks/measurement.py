"""Measures victims and the innocent tenant during one attack."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trunkline_bench.attacks.attack_process import AttackProcess
from trunkline_bench.attacks.attack_result import AttackResult
from trunkline_bench.attacks.catalogue import NONE, Case, Section
from trunkline_bench.attacks.host_faults import HOST_FAULTS
from trunkline_bench.attacks.innocent import Innocent
from trunkline_bench.attacks.neighbour import Neighbour
from trunkline_bench.attacks.server import Server
from trunkline_bench.attacks.vectors.false_worker import ASKED
from trunkline_bench.attacks.window import Window

LOOK_S = 0.02
REST_S = 3.0  # memory must fall within this time after the attack
LIE_S = 1.0  # added to the window of a false worker: it goes on lying after its description


@dataclass(frozen=True, slots=True)
class Measurement:
    """One attack. `victim`: the server whose memory and event loop are watched; `target`: the attacked address; `keys`:
    the router's file of API keys, for faults of its host."""

    case: Case
    innocent: Innocent
    victim: Server
    target: str
    router: Server
    workers: Sequence[Server]
    neighbour: Neighbour | None
    keys: Path

    async def measure(self, result: AttackResult, window: Window) -> None:
        """Runs the attack and fills in `result`. Raises FleetError."""
        victim, kept_mib = self.victim, result.bounds.kept_mib
        result.rss_before = victim.rss_mib()
        began_s = time.monotonic()
        watching = asyncio.create_task(self._most_memory(result))
        try:
            await self._attack(window, result)
            ended_s = time.monotonic()
            for _ in range(round(REST_S / LOOK_S)):
                if victim.rss_mib() - result.rss_before <= kept_mib:
                    break
                await asyncio.sleep(LOOK_S)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        result.rss_after = victim.rss_mib()
        result.lag = victim.lag(began_s, ended_s)

    async def _attack(self, window: Window, result: AttackResult) -> None:
        """Runs the attack until the innocent's last request has ended."""
        case, neighbour, record = self.case, self.neighbour, result.record
        if case.attack == NONE:
            await self.innocent.ask_for(window, record)
        elif case.section is Section.LIAR:
            assert neighbour is not None
            await neighbour.start()
            asked = asyncio.create_task(neighbour.process.wait_for(ASKED))
            await self.innocent.ask_while(lambda: not asked.done(), record)
            await asked
            await self.innocent.ask_for(replace(window, least_s=LIE_S + window.least_s), record)
            result.outcomes = await neighbour.as_told_by(self.router)
        elif case.section is Section.HOST:
            async with HOST_FAULTS[case.attack](self.router, self.keys, self.innocent.model) as found:
                await self.innocent.ask_for(window, record)
            result.outcomes = ", ".join(f"{count:,} {name}" for name, count in found.items())
        else:
            attack = AttackProcess(case.attack, self.target, window.most_s)
            try:
                await attack.begins()
                await self.innocent.ask_for(window, record)
                outcomes = await attack.end()
            finally:
                await attack.stop()
            if case.section is Section.NAMESAKE:
                outcomes["workers lost"] = sum(worker.ends for worker in self.workers)
            result.outcomes = ", ".join(f"{count:,} {name}" for name, count in outcomes.items() if count)
            if case.bounds.statuses:
                result.strange_statuses = tuple(name for name in outcomes if name not in case.bounds.statuses)

    async def _most_memory(self, result: AttackResult) -> None:
        while True:
            result.rss_peak = max(result.rss_peak, self.victim.rss_mib())
            await asyncio.sleep(LOOK_S)
