"""Accidents that happen to a fleet while its streams run."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from trunkline.errors import NoWorker
from trunkline_bench.faults.fleet import Fleet, Worker
from trunkline_bench.faults.streams import Order, Record, Streams, busiest_worker

STRIKE_SHARE = 0.1  # share of all tokens that have arrived when the accident happens
UNAVAILABLE = NoWorker.__name__  # the client's exception for it

Accident = Callable[[Fleet, Worker], Coroutine[Any, Any, None]]


async def kill_engine(fleet: Fleet, victim: Worker) -> None:
    victim.kill_engine()


async def kill_front(fleet: Fleet, victim: Worker) -> None:
    victim.kill_front()


async def hang_engine(fleet: Fleet, victim: Worker) -> None:
    victim.hang_engine()


async def hang_front(fleet: Fleet, victim: Worker) -> None:
    victim.hang_front()


async def reset_link(fleet: Fleet, victim: Worker) -> None:
    victim.proxy.reset()


async def stall_link(fleet: Fleet, victim: Worker) -> None:
    victim.proxy.stall()


async def drain(fleet: Fleet, victim: Worker) -> None:
    await victim.drain(0.2)


async def rolling_restart(fleet: Fleet, victim: Worker) -> None:
    for worker in fleet.workers:
        await worker.restart()
        await fleet.all_ready()


async def recover(fleet: Fleet, victim: Worker) -> None:
    """Repairs the fleet after an accident. Returns when all workers are ready."""
    victim.proxy.heal()
    victim.resume()
    if (await victim.load()).draining:
        await victim.restart()
    await fleet.all_ready()


ACCIDENTS: dict[str, Accident] = {
    "kill -9 of an engine": kill_engine,
    "kill -9 of a front": kill_front,
    "engine stopped (SIGSTOP), continued later": hang_engine,
    "front stopped (SIGSTOP), continued later": hang_front,
    "link reset": reset_link,
    "link stalled, healed later": stall_link,
    "drain that hands over after 0.2 s": drain,
    "rolling restart of every worker": rolling_restart,
}


@dataclass(slots=True)
class Outcome:
    """Effects of an accident on the streams."""

    records: Sequence[Record]
    resumed: int  # streams that continued on another worker
    tokens: int
    errors: list[str]
    differing: list[int] = field(
        default_factory=list
    )  # numbers of the streams that differ from the run without the accident
    seams: list[str] = field(default_factory=list)  # tokens lost or repeated
    recovery_s: list[float] = field(default_factory=list)  # longest silence of each resumed stream

    @property
    def is_clean(self) -> bool:
        return not (self.errors or self.differing or self.seams)

    def recovery(self) -> str:
        if not self.recovery_s:
            return "—"
        return f"{median(self.recovery_s):.2f} / {max(self.recovery_s):.2f} s"


async def poisoned(
    fleet: Fleet, wanted: Sequence[Order], expected: Sequence[Record], poison: Order
) -> tuple[Outcome, Record, int]:
    """Runs all streams but the last beside a request that kills engines, that request again, and then the last stream.

    Returns the outcome of the streams, the record of the poisoned request, and the number of workers lost."""
    starts = sum(worker.starts for worker in fleet.workers)
    struck_s = time.monotonic()
    *records, sick = await Streams().run(fleet.clients, [*wanted[:-1], poison])
    (again,) = await Streams().run(fleet.clients, [poison])
    sick.asked_again = again.error
    records += await Streams().run(fleet.clients, wanted[-1:])
    await fleet.all_ready()
    await fleet.nothing_live()
    return compare(records, expected, struck_s), sick, sum(worker.starts for worker in fleet.workers) - starts


@dataclass(frozen=True, slots=True)
class RouterLoss:
    """Effects of a killed router: the number of its streams and of other routers' streams, and the errors of each.

    Errors are named by the client's exception class."""

    own: int
    others: int
    own_errors: Counter[str]
    other_errors: Counter[str]

    @property
    def is_contained(self) -> bool:
        """Its own streams failed only with UNAVAILABLE, and no other stream failed."""
        return set(self.own_errors) == {UNAVAILABLE} and not self.other_errors

    def __str__(self) -> str:
        def told(errors: Counter[str]) -> str:
            named = {"UNAVAILABLE" if name == UNAVAILABLE else name: count for name, count in sorted(errors.items())}
            return ", ".join(f"{count} {name}" for name, count in named.items()) or "none"

        return (
            f"errors of its {self.own} streams: {told(self.own_errors)}; "
            f"of the other's {self.others}: {told(self.other_errors)}"
        )


async def router_killed(
    fleet: Fleet, wanted: Sequence[Order], expected: Sequence[Record]
) -> tuple[Outcome, RouterLoss]:
    """Kills the first of several routers under load. Streams that fail are retried at the next router.

    Returns the outcome after the retries, and the errors before them."""
    strike = asyncio.Event()
    enough = sum(len(tokens) for record in expected for tokens in record.token_ids.values()) * STRIKE_SHARE
    streams = Streams(lambda total: strike.set() if total >= enough else None)
    running = asyncio.create_task(streams.run(fleet.clients, wanted, retries=1))
    await strike.wait()
    struck_s = time.monotonic()
    fleet.routers[0].kill()
    records = await running
    await fleet.nothing_live()
    own, others = records[:: len(fleet.clients)], [r for n, r in enumerate(records) if n % len(fleet.clients)]
    own_errors, other_errors = (Counter(r.asked_again for r in part if r.asked_again) for part in (own, others))
    return compare(records, expected, struck_s), RouterLoss(len(own), len(others), own_errors, other_errors)


async def redis_lost(
    fleet: Fleet,
    wanted: Sequence[Order],
    expected: Sequence[Record],
    lose: Callable[[], None],
    find: Callable[[], None],
) -> Outcome:
    """Runs all streams three times: one run loses Redis, one begins without it, and one begins after it is back.

    The outcome's recovery is the time to first token of the streams that began without Redis."""
    strike = asyncio.Event()
    streams = Streams(lambda total: strike.set())
    running = asyncio.create_task(streams.run(fleet.clients, wanted))
    await strike.wait()
    await asyncio.to_thread(lose)
    without = await Streams().run(fleet.clients, wanted)
    await asyncio.to_thread(find)
    records = [*await running, *without, *await Streams().run(fleet.clients, wanted)]
    await fleet.nothing_live()
    outcome = compare(records, [*expected] * 3, 0.0)
    outcome.recovery_s = [record.ttft_s for record in without if record.arrivals_s]
    return outcome


async def undisturbed(fleet: Fleet, wanted: Sequence[Order]) -> list[Record]:
    return await Streams().run(fleet.clients, wanted)


async def struck(fleet: Fleet, wanted: Sequence[Order], expected: Sequence[Record], accident: Accident) -> Outcome:
    """Runs all streams, with the accident in the middle, and repeats them until the accident is over.

    Repairs the fleet afterwards."""
    enough = sum(len(tokens) for record in expected for tokens in record.token_ids.values()) * STRIKE_SHARE
    strike = asyncio.Event()

    def on_token(total: int) -> None:
        if total >= enough:
            strike.set()

    streams = Streams(on_token)
    running = asyncio.create_task(streams.run(fleet.clients, wanted))
    await strike.wait()
    victim = fleet.worker(busiest_worker(streams.unfinished))  # to ask the workers would take as long as some streams
    struck_s = time.monotonic()
    happening = asyncio.create_task(accident(fleet, victim))
    records, rounds = await running, 1
    while not happening.done():
        records += await Streams().run(fleet.clients, wanted)
        rounds += 1
    await happening
    await recover(fleet, victim)
    await fleet.nothing_live()
    return compare(records, [*expected] * rounds, struck_s)


def compare(records: Sequence[Record], expected: Sequence[Record], struck_s: float) -> Outcome:
    pairs = list(zip(records, expected, strict=True))
    resumed = [record for record in records if record.resumptions]
    return Outcome(
        records=records,
        resumed=len(resumed),
        tokens=sum(len(tokens) for record in records for tokens in record.token_ids.values()),
        errors=[record.error for record in records if record.error],
        differing=[number for number, (got, want) in enumerate(pairs) if got.outcome() != want.outcome()],
        seams=[seam for record in records for seam in record.seams],
        recovery_s=[record.longest_gap_s(struck_s) for record in resumed],
    )
