"""What observation costs a router.

Two routers before the same source take turns: one with everything off; of the other, a tenth of the requests is traced
to an OTLP receiver, metrics are scraped every 15 seconds, and a page watches the fleet. CPU time is compared, because
it depends less than other times on what else the machine does. Each pair has routers of its own: two equal processes
differ by up to a tenth for as long as they live.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from trunkline_bench.observation.cost_pairs import Pair, Pairs
from trunkline_bench.observation.load_process import LoadProcess, load_process
from trunkline_bench.observation.observer import Observations, Observer
from trunkline_bench.observation.receiver import receiver
from trunkline_bench.streaming.client import Load, Seen
from trunkline_bench.streaming.processes import Hop, printed_address, process, router_hops

ON_HOPS, OFF_HOPS = ("on", "on, HTTP"), ("off", "off, HTTP")
GRPC, HTTP = 0, 1  # of both
SETTLED_S = 1.2  # after the last turn, until its spans are exported; this time counts for both routers
WARM_UP_SHARE = 0.2
OFF = {"OTEL_TRACES_EXPORTER": "none"}  # without a variable that this process may have
SPANS = "trunkline_router_spans_total"


def traced(collector: str) -> dict[str, str]:
    """The variables of a router that traces a tenth of its requests."""
    return {
        "OTEL_TRACES_EXPORTER": "otlp",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector,
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": "0.1",
    }


@dataclass(frozen=True, slots=True)
class Work:
    """What one row of the report measures.

    hop: GRPC or HTTP
    load: of one turn
    turns: of each router in a pair
    of_tokens: the figure is tokens per CPU second, otherwise requests per CPU second
    """

    name: str
    hop: int
    load: Load
    turns: int
    of_tokens: bool = False

    def count(self, seen: Seen) -> int:
        """What a router did in a turn."""
        return seen.tokens if self.of_tokens else seen.requests


def works(share: float = 1.0) -> Sequence[Work]:
    """The works, of some seconds each. share: of the usual number of turns"""

    def scaled(turns: int) -> int:
        return max(1, round(turns * share))

    streams = [
        Work(f"tokens over gRPC, {count} streams", GRPC, Load("", "edge", count, tokens), scaled(2), of_tokens=True)
        for count, tokens in ((64, 2400), (256, 600))
    ]
    requests = [
        Work(f"requests of one token over {name}", hop, Load("", wire, 64, 1, rounds=40, text=text), scaled(2))
        for name, hop, wire, text in (
            ("gRPC, ids", GRPC, "edge", False),
            ("gRPC, text", GRPC, "edge", True),
            ("HTTP, ids", HTTP, "http", False),
            ("HTTP, text", HTTP, "http", True),
        )
    ]
    return (*streams, *requests)


@dataclass(frozen=True, slots=True)
class Routers:
    """Both routers, each with its two hops, and the client. observer: of the one that is observed"""

    off: tuple[Hop, Hop]
    on: tuple[Hop, Hop]
    observer: Observer
    client: LoadProcess

    def hop(self, work: Work, *, is_observed: bool) -> Hop:
        return (self.on if is_observed else self.off)[work.hop]

    async def turn(self, work: Work, *, is_observed: bool) -> int:
        """Loads one of the routers once; returns what it did."""
        address = self.hop(work, is_observed=is_observed).address
        async with self.observer.observed() if is_observed else contextlib.nullcontext():
            return work.count(await self.client.run(replace(work.load, address=address)))

    async def pair(self, work: Work, *, on_first: bool) -> Pair:
        """The routers take turns. What they do between two turns counts, too."""
        hops = {is_observed: self.hop(work, is_observed=is_observed) for is_observed in (on_first, not on_first)}
        before_s = {is_observed: hop.cpu_s() for is_observed, hop in hops.items()}
        done = dict.fromkeys(hops, 0)
        for _ in range(work.turns):
            for is_observed in hops:
                done[is_observed] += await self.turn(work, is_observed=is_observed)
        await asyncio.sleep(SETTLED_S)
        rates = {each: done[each] / (hop.cpu_s() - before_s[each]) for each, hop in hops.items()}
        return Pair(off=rates[False], on=rates[True])


@contextlib.asynccontextmanager
async def routers(against: Path | None, *, on_first: bool) -> AsyncIterator[Routers]:
    """Starts everything.

    against: checkout of the router that is not observed; None: this one
    on_first: the router that is observed starts before the other one
    """
    async with contextlib.AsyncExitStack() as stack:
        source = await stack.enter_async_context(process("trunkline_bench.streaming.source"))
        worker = await printed_address(source)
        collector = stack.enter_context(receiver())
        starts = [
            partial(router_hops, stack, worker, ON_HOPS, variables=traced(collector)),
            partial(router_hops, stack, worker, OFF_HOPS, against, OFF),
        ]
        found: dict[str, Hop] = {}
        for start in starts if on_first else reversed(starts):
            found |= await start()
        observer = Observer(found[ON_HOPS[HTTP]].address)
        client = await stack.enter_async_context(load_process())
        off, on = ((found[grpc], found[http]) for grpc, http in (OFF_HOPS, ON_HOPS))
        yield Routers(off, on, observer, client)


@dataclass(slots=True)
class Observed:
    """What was observed of all routers."""

    scrapes: int = 0
    views: int = 0
    spans: Counter[str] = field(default_factory=Counter)  # by outcome

    def add(self, seen: Observations) -> None:
        """Adds what was observed of one."""
        self.scrapes += seen.scrapes
        self.views += seen.views
        for outcome in ("exported", "failed", "dropped", "withheld"):
            self.spans[outcome] += int(seen.sample(SPANS, f'outcome="{outcome}"'))

    def __str__(self) -> str:
        spans = ", ".join(f"{count:,} {outcome}" for outcome, count in self.spans.items())
        return f"{self.scrapes} scrapes in OpenMetrics, {self.views} views of the page; spans: {spans}"


async def measured(count: int, against: Path | None, share: float = 1.0) -> tuple[Pairs, Observed]:
    """Pairs of each row, and what was observed meanwhile. Each pair begins with a short run of each work, which is
    dropped. Four pairs have all orders of starts and of turns, so that a machine that becomes slower is no router's
    fault."""
    pairs: Pairs = {work.name: [] for work in works()}
    observed = Observed()
    for number in range(count):
        on_first = bool(number % 2)
        async with routers(against, on_first=bool(number // 2 % 2)) as both:
            for work in works(share * WARM_UP_SHARE):
                for is_observed in (on_first, not on_first) * work.turns:
                    await both.turn(work, is_observed=is_observed)
            for work in works(share):
                pairs[work.name].append(pair := await both.pair(work, on_first=on_first))
                print(f"{number + 1}. {work.name}: {pair.ratio:.3f}", flush=True)
            await both.observer.scrape()
            observed.add(both.observer.seen)
    return pairs, observed
