"""Tenants that share one simulated worker: the real engine in virtual time, with clients that react to its answers."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush

from trunkline.engine.v1.engine_pb2 import EngineRequest, EngineStep
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.worker_pb2 import Submit
from trunkline_bench.simulation.worker.simulated_executor import (
    END_TOKEN,
    FIRST_TOKEN,
    SimulatedExecutor,
    VirtualClock,
)
from trunkline_bench.simulation.worker.simulated_worker import FINGERPRINT, StatsOfAllTime, WorkerSpec
from trunkline_worker.cache.blocks import KVBlocks
from trunkline_worker.cache.prefix_tree import PrefixTree
from trunkline_worker.cache.sequence import Sequence
from trunkline_worker.engine.engine import Engine, ModelLimits
from trunkline_worker.engine.messages import Prompt
from trunkline_worker.scheduler.scheduler import Scheduler
from trunkline_worker.step.lanes import Lane, lane_number
from trunkline_worker.step.plan import Run

REFUSED_S = 0.1  # pause of a client after a refusal


@dataclass(frozen=True, slots=True)
class Tenant:
    """A client that keeps `concurrency` requests of one shape in flight."""

    name: str
    concurrency: int
    prompt_tokens: int
    output_tokens: int
    pause_s: float = 0.0  # between the end of a request and the next one
    abort_after_s: float | None = None  # it aborts each request after this time
    starts_s: float = 0.0
    ends_s: float = float("inf")  # it sends no requests after this time
    weight: float = 1.0
    lane: Lane = Lane.STANDARD
    shares_prefix: bool = False  # its prompts differ only in the last token
    forced_tokens: int = 0  # that a grammar forces after each token that is sampled


@dataclass(slots=True)
class Seen:
    """Outcomes of one tenant's requests."""

    ttft_s: list[float] = field(default_factory=list)
    finished: int = 0
    refused: int = 0
    aborted: int = 0
    output_tokens: int = 0
    served_tokens: int = 0  # output tokens, and prompts that were computed completely
    waiting_s: dict[int, float] = field(default_factory=dict)  # send times of requests without a first token, by handle

    def latest_s(self, now_s: float) -> list[float]:
        """Times to first token; for requests without one, how long they have waited."""
        return [*self.ttft_s, *(now_s - sent_s for sent_s in self.waiting_s.values())]


@dataclass(slots=True)
class Observed:
    """The result of a run."""

    tenants: dict[str, Seen]
    duration_s: float
    computed_tokens: int  # of prompts and outputs, including recomputed ones
    preemptions: int
    preempted_tokens: int


class Forcing:
    """A proposer: grammars force tokens of some tenants."""

    def __init__(self, tenants: Mapping[str, Tenant]) -> None:
        self._tenants = tenants

    def follows(self, sequence: Sequence) -> bool:
        return self._tenants[sequence.account.tenant].forced_tokens > 0

    def holds(self, sequence: Sequence) -> bool:
        return sequence.num_pending > 0 and self.follows(sequence)

    def propose(self, sequence: Sequence, most: int) -> Run | None:
        count = min(most, self._tenants[sequence.account.tenant].forced_tokens)
        return Run.of([FIRST_TOKEN] * count, count)


class Neighbours:
    """Runs an engine and its tenants in virtual time."""

    def __init__(self, spec: WorkerSpec, tenants: list[Tenant]) -> None:
        self.clock = VirtualClock()
        self.stats = StatsOfAllTime(0.0)
        self.seen = {tenant.name: Seen() for tenant in tenants}
        self._lengths: dict[int, int] = {}
        self._executor = SimulatedExecutor(
            spec.cost, self.clock, self._lengths, run_ahead=spec.run_ahead, host_s=spec.host_s
        )
        blocks = KVBlocks(spec.num_blocks, PrefixTree(FINGERPRINT, spec.block_size))
        self.scheduler = Scheduler(spec.limits, blocks, self.stats)
        limits = ModelLimits(spec.max_total_tokens, frozenset([END_TOKEN]))
        self.engine = Engine(self.scheduler, self._executor, limits, self.clock)
        self._tenants = {tenant.name: tenant for tenant in tenants}
        if any(tenant.forced_tokens for tenant in tenants):
            self.scheduler.runs.proposer = Forcing(self._tenants)
        self._of: dict[int, Tenant] = {}  # tenants of the requests in flight, by handle
        self._handles = itertools.count(1)
        self._order = itertools.count()
        # (time, tie-breaker, event): a tenant that sends a request, or a handle that is aborted
        self._events: list[tuple[float, int, Tenant | int]] = []
        for tenant in tenants:
            for _ in range(tenant.concurrency):
                self._at(tenant.starts_s, tenant)

    def run(self, until_s: float) -> Observed:
        """Runs all events before `until_s`. Raises RuntimeError if work is left but no event can follow."""
        clock, engine, events = self.clock, self.engine, self._events
        while clock.now_s < until_s:
            while events and events[0][0] <= clock.now_s:
                self._happen(heappop(events)[2])
            step = engine.step() if engine.has_work else None
            if step is not None:
                self._take(step)
            elif not engine.has_work or engine.is_waiting:
                times_s = [time_s for time_s, _, _ in events[:1]]
                times_s.append(self._executor.next_done_s)
                wakes_s = engine.wakes_s() if engine.has_work else None
                if wakes_s is not None and wakes_s > clock.now_s:
                    times_s.append(wakes_s)
                if min(times_s) == float("inf") and engine.has_work:
                    raise RuntimeError(f"the engine has work, but no event follows {clock.now_s:.3f} s of virtual time")
                clock.advance_to(min(*times_s, until_s))
        counts = engine.stats().steps
        return Observed(
            self.seen,
            clock.now_s,
            counts.prefill_tokens + counts.decode_tokens,
            counts.preemptions,
            counts.preempted_tokens,
        )

    def _at(self, time_s: float, what: Tenant | int) -> None:
        heappush(self._events, (time_s, next(self._order), what))

    def _happen(self, what: Tenant | int) -> None:
        now_s = self.clock.now_s
        if isinstance(what, int):
            if what in self._of:
                self.engine.accept(EngineRequest(abort_handles=[what]))
                self.seen[self._of[what].name].aborted += 1
                self._ended(what, 0.0)
            return
        if now_s >= what.ends_s:
            return
        handle = next(self._handles)
        self._of[handle] = what
        self._lengths[handle] = what.output_tokens
        self.seen[what.name].waiting_s[handle] = now_s
        sampling = SamplingParams(seed=0, max_tokens=what.output_tokens)
        submit = Submit(
            handle=handle,
            sampling=sampling,
            lane=lane_number(what.lane),  # type: ignore[arg-type]
            tenant=what.name,
            tenant_weight=what.weight,
        )
        # Prompts share no blocks unless the tenant shares a prefix.
        begins, ends = (FIRST_TOKEN, handle) if what.shares_prefix else (handle + FIRST_TOKEN, FIRST_TOKEN)
        prompt = [begins] * (what.prompt_tokens - 1) + [ends]
        self.engine.submit(submit, Prompt(prompt))
        if what.abort_after_s is not None:
            self._at(now_s + what.abort_after_s, handle)

    def _take(self, step: EngineStep) -> None:
        now_s = self.clock.now_s
        for handle in step.token_handles:
            seen = self.seen[self._of[handle].name]
            seen.output_tokens += 1
            seen.served_tokens += 1
        for output in step.outputs:
            tenant = self._of.get(output.handle)
            if tenant is None:
                continue
            seen = self.seen[tenant.name]
            seen.output_tokens += len(output.token_ids)
            seen.served_tokens += len(output.token_ids)
            if output.HasField("prompt"):
                seen.served_tokens += tenant.prompt_tokens
                seen.ttft_s.append(now_s - seen.waiting_s.pop(output.handle))
            if output.HasField("error"):
                seen.refused += 1
                self._ended(output.handle, REFUSED_S)
            elif output.finish_reason:
                seen.finished += 1
                self._ended(output.handle, tenant.pause_s)

    def _ended(self, handle: int, pause_s: float) -> None:
        """Schedules the client's next request."""
        tenant = self._of.pop(handle)
        self.seen[tenant.name].waiting_s.pop(handle, None)
        self._at(self.clock.now_s + pause_s, tenant)
