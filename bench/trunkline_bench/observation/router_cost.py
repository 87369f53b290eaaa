"""What observation costs a router.

Two routers before the same source take turns: one with everything off; of the other, a tenth of the requests is traced
to an OTLP receiver, metrics are scraped each second, and a page watches the fleet. CPU time is compared, because it
depends little on what else the machine does. Each pair has routers of its own: two equal processes differ by up to a
tenth for as long as they live.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from trunkline_bench.observation.cost_pairs import Pair, Pairs
from trunkline_bench.observation.load_process import LoadProcess, load_process
from trunkline_bench.observation.observer import Observations, Observer
from trunkline_bench.observation.receiver import receiver
from trunkline_bench.streaming.client import Load, Seen
from trunkline_bench.streaming.processes import Hop, printed_address, process, router_hops

ON_HOPS, OFF_HOPS = ("on", "on, HTTP"), ("off", "off, HTTP")
GRPC, HTTP = 0, 1  # of both
SETTLED_S = 1.2  # after a load, until its last spans are exported; this time counts for both routers
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

    hop: GRPC or HTTP; of_tokens: the figure is tokens per CPU second, otherwise requests per CPU second
    """

    name: str
    hop: int
    load: Load
    of_tokens: bool = False

    def per_cpu_s(self, seen: Seen, cpu_s: float) -> float:
        """The figure of one run; more is better."""
        return (seen.tokens if self.of_tokens else seen.requests) / cpu_s


def works(share: float = 1.0) -> Sequence[Work]:
    """Runs of a second or two. share: of the usual size"""

    def scaled(count: int) -> int:
        return max(1, round(count * share))

    streams = [
        Work(f"tokens over gRPC, {count} streams", GRPC, Load("", "edge", count, scaled(tokens)), of_tokens=True)
        for count, tokens in ((64, 2400), (256, 600))
    ]
    requests = [
        Work(f"requests of one token over {name}", hop, Load("", wire, 64, 1, rounds=scaled(rounds), text=text))
        for name, hop, wire, rounds, text in (
            ("gRPC, ids", GRPC, "edge", 50, False),
            ("gRPC, text", GRPC, "edge", 45, True),
            ("HTTP, ids", HTTP, "http", 40, False),
            ("HTTP, text", HTTP, "http", 35, True),
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

    async def load(self, work: Work, *, is_observed: bool) -> Seen:
        """Loads one of the routers."""
        return await self.client.run(replace(work.load, address=self.hop(work, is_observed=is_observed).address))

    async def run(self, work: Work, *, is_observed: bool) -> float:
        """One run on one of the routers; returns its figure."""
        hop = self.hop(work, is_observed=is_observed)
        before_s = hop.cpu_s()
        async with self.observer.scraped() if is_observed else contextlib.nullcontext():
            seen = await self.load(work, is_observed=is_observed)
        await asyncio.sleep(SETTLED_S)
        return work.per_cpu_s(seen, hop.cpu_s() - before_s)

    async def pair(self, work: Work, *, on_first: bool) -> Pair:
        """One run on each."""
        rates = {is_observed: await self.run(work, is_observed=is_observed) for is_observed in (on_first, not on_first)}
        return Pair(off=rates[False], on=rates[True])


@contextlib.asynccontextmanager
async def routers(against: Path | None) -> AsyncIterator[Routers]:
    """Starts everything. against: checkout of the router that is not observed; None: this one"""
    async with contextlib.AsyncExitStack() as stack:
        source = await stack.enter_async_context(process("trunkline_bench.streaming.source"))
        worker = await printed_address(source)
        collector = stack.enter_context(receiver())
        found = await router_hops(stack, worker, OFF_HOPS, against, OFF)
        found |= await router_hops(stack, worker, ON_HOPS, variables=traced(collector))
        observer = Observer(found[ON_HOPS[HTTP]].address)
        await stack.enter_async_context(observer.watched())
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
    dropped. The order changes from pair to pair, so that a machine that becomes slower is no router's fault."""
    pairs: Pairs = {work.name: [] for work in works()}
    observed = Observed()
    for number in range(count):
        async with routers(against) as both:
            for work in works(share * WARM_UP_SHARE):
                for is_observed in (False, True):
                    await both.load(work, is_observed=is_observed)
            for work in works(share):
                pairs[work.name].append(pair := await both.pair(work, on_first=bool(number % 2)))
                print(f"{number + 1}. {work.name}: {pair.ratio:.3f}", flush=True)
            await both.observer.scrape()
            observed.add(both.observer.seen)
    return pairs, observed
