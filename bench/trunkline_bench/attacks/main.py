"""`make bench-attacks`: what one hostile client can do to a router and its other clients, with real workers.

usage: python -m trunkline_bench.attacks.main [--only TEXT] [--seconds 8] [--model deploy/demo/tiny-tales]

A row for each attack, as soon as it is measured. Exits with status 1 where a bound was broken.
"""

import argparse
import asyncio
import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trunkline.client import Client
from trunkline.errors import TrunklineError
from trunkline_bench.attacks.attacker import NAMES
from trunkline_bench.facts import facts, listed, make_command
from trunkline_bench.faults.fleet import Fleet, running_fleet
from trunkline_bench.simulation.report import percentile

MODEL = Path(__file__).parents[3] / "deploy" / "demo" / "tiny-tales"
RESULTS = Path(__file__).parents[2] / "results"
MAX_P99_MS = 250.0
MAX_RSS_MIB = 1024.0
REST_S = 3.0  # after the attack, before memory is looked at again
PACE_S = 0.01  # between two requests of the innocent client
REQUEST_TIMEOUT_S = 120.0
HELD_UP = re.compile(r'"?lag_ms"?[:=] ?(\d+)')
PAGES_PER_MIB = 256


@dataclass(slots=True)
class Row:
    """What one attack came to. Times in ms, memory in MiB."""

    attack: str
    outcomes: str
    times_ms: list[float] = field(default_factory=list)  # of the innocent client, from the attack's start on
    failures: int = 0
    rss_before: float = 0.0
    rss_peak: float = 0.0
    rss_after: float = 0.0
    loop_lag_ms: int = 0  # of those that the router has logged, from 250 ms on

    @property
    def holds(self) -> bool:
        return not self.failures and percentile(self.times_ms, 0.99) < MAX_P99_MS and self.rss_peak < MAX_RSS_MIB

    def markdown(self) -> str:
        p50, p99 = (percentile(self.times_ms, share) for share in (0.5, 0.99))
        cells = (
            self.attack,
            self.outcomes,
            f"{p50:.0f}",
            f"{p99:.0f}",
            f"{max(self.times_ms):.0f}",
            str(self.failures),
            str(self.loop_lag_ms or "< 250"),
            f"{self.rss_before:.0f}",
            f"{self.rss_peak:.0f}",
            f"{self.rss_after:.0f}",
            "holds" if self.holds else "BROKEN",
        )
        return f"| {' | '.join(cells)} |"


HEAD = (
    "| attack | what became of it | innocent p50, ms | p99 | most | failed | router's loop lag, ms "
    "| RSS before, MiB | peak | 3 s after | verdict |\n|" + "---|" * 11
)


async def measure(attack: str | None, fleet: Fleet, seconds: float) -> Row:
    """One attack, or as much time without one."""
    router, row = fleet.routers[0], Row(attack or "none", "")
    row.rss_before = row.rss_peak = _rss_mib(router.pid)
    router.lines.clear()
    struck = asyncio.Event()

    async def innocent() -> None:
        while not struck.is_set() or not row.times_ms:
            started_s = time.monotonic()
            try:
                await fleet.clients[0].complete("Once", max_tokens=1, timeout_s=REQUEST_TIMEOUT_S)
            except TrunklineError:
                row.failures += 1
            row.times_ms.append((time.monotonic() - started_s) * 1e3)
            await asyncio.sleep(PACE_S)

    async def watch() -> None:
        while True:
            row.rss_peak = max(row.rss_peak, _rss_mib(router.pid))
            await asyncio.sleep(0.02)

    watching, calling = asyncio.create_task(watch()), asyncio.create_task(innocent())
    if attack is None:
        await asyncio.sleep(seconds)
    else:
        command = ("-m", "trunkline_bench.attacks.attacker", attack, fleet.addresses[0], f"--seconds={seconds}")
        process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=subprocess.PIPE)
        printed, _ = await process.communicate()
        row.outcomes = ", ".join(f"{count} {name}" for name, count in json.loads(printed).items())
    struck.set()
    await calling
    await asyncio.sleep(REST_S)
    watching.cancel()
    row.rss_after = _rss_mib(router.pid)
    held_up = [int(found[1]) for line in router.lines if "held up" in line and (found := HELD_UP.search(line))]
    row.loop_lag_ms = max(held_up, default=0)
    return row


def _rss_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) / PAGES_PER_MIB


async def run(model: Path, names: Sequence[str | None], seconds: float, report: Path, head: str) -> bool:
    """Whether every bound held. Each attack meets a router that has just started."""
    holds = True
    with report.open("w") as file:

        def say(text: str) -> None:
            print(text, flush=True)
            file.write(text + "\n")
            file.flush()

        say(head + HEAD)
        for name in names:
            async with running_fleet(model, workers=1) as fleet:
                async with Client(fleet.addresses[0]) as client:  # connections and caches are warm
                    await client.complete("Once", max_tokens=1)
                row = await measure(name, fleet, seconds)
            holds &= row.holds
            say(row.markdown())
    return holds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="attacks whose name contains this")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    flags = [f"--only={arguments.only}"] if arguments.only else []
    command = make_command("bench-attacks", [*flags, f"--seconds={arguments.seconds:g}"])
    found = facts(command, "shared by router, worker and clients", ("trunkline", "grpcio", "tokenizers"))
    names: list[str | None] = [None, *(name for name in NAMES if arguments.only in name)]
    arguments.output.mkdir(parents=True, exist_ok=True)
    report = arguments.output / f"attacks-{found['date']}.md"
    head = (
        "# Attacks on a router by one client\n\n"
        + listed(found)
        + "- an innocent client sends one-token requests all the time; a router, a worker with the demo model, and the "
        "attacker as a process of its own\n\n"
    )
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(not asyncio.run(run(arguments.model, names, arguments.seconds, report, head)))


if __name__ == "__main__":
    main()
