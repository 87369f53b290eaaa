"""A scheduler with an executor that checks it, which the tests of the engine's core drive."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from tests.worker.fake_executor import HistoryExecutor
from trunkline.block_hash import packed_hash
from trunkline_worker.cache.blocks import KVBlocks
from trunkline_worker.cache.prefix_tree import PrefixTree
from trunkline_worker.cache.sequence import AwaitedResource, Finish
from trunkline_worker.cache.sequence import Sequence as EngineSequence
from trunkline_worker.scheduler.limits import SchedulerLimits
from trunkline_worker.scheduler.scheduler import Scheduler
from trunkline_worker.scheduler.sequence_table import StepOutput, StepOutputs
from trunkline_worker.scheduler.stats import EngineStats
from trunkline_worker.step.lanes import Lane
from trunkline_worker.step.plan import PositionLogprobs, Sampling, StepPlan, StepResult

BLOCK_SIZE = 4


class Rig:
    """Submits, steps, and collects; every step ends with an integrity check."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = BLOCK_SIZE,
        max_step_tokens: int = 64,
        max_running: int = 8,
        hash_block: Callable[[bytes, bytes], bytes] = packed_hash,
        run_ahead: int = 0,
        **limits: object,
    ) -> None:
        self.now_s = 0.0  # each step takes a second
        self.run_ahead = run_ahead
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self.tree = PrefixTree("model", block_size, hash_block)
        self.blocks = KVBlocks(num_blocks, self.tree)
        self.stats = EngineStats(0.0)
        self.scheduler = Scheduler(
            SchedulerLimits(max_step_tokens, max_running, **limits),  # type: ignore[arg-type]
            self.blocks,
            self.stats,
        )
        self.executor = HistoryExecutor(num_blocks=num_blocks, block_size=block_size)
        self.sequences: dict[int, EngineSequence] = {}
        self.outputs: dict[int, list[int]] = {}
        self.wholes: dict[int, list[float]] = {}  # of sequences without output tokens
        self.logprobs: dict[int, list[PositionLogprobs]] = {}
        self.prompt_logprobs: dict[int, list[PositionLogprobs] | None] = {}
        self.finished: dict[int, Finish] = {}
        self.cached: dict[int, int] = {}
        self.plans: list[StepPlan] = []
        self.committed = StepOutputs()  # of the latest step
        self.tokens_computed = 0

    def submit(
        self,
        prompt: list[int],
        max_tokens: int = 8,
        *,
        output: Sequence[int] = (),
        lane: Lane = Lane.STANDARD,
        tenant: str = "",
        weight: float = 1.0,
        within_s: float | None = None,
        awaits: Iterable[AwaitedResource] = (),
        **options: object,
    ) -> int:
        """Submits a sequence; `output`: tokens generated on another worker; `within_s`: its deadline from now."""
        sequence_id = len(self.sequences) + 1
        salt = options.pop("salt", b"")
        assert isinstance(salt, bytes)
        room = self.blocks.num_blocks * self.blocks.block_size - len(prompt)
        sampling = Sampling(max_tokens=min(max_tokens, room), **options)  # type: ignore[arg-type]
        sequence = EngineSequence(
            sequence_id,
            [*prompt, *output],
            len(prompt),
            sampling,
            self.tree.root(salt),
            arrival=sequence_id,
            account=self.scheduler.waiting.lanes[lane].account(tenant, weight),
            arrival_s=self.now_s,
            deadline_s=None if within_s is None else self.now_s + within_s,
            awaits=frozenset(awaits),
        )
        self.sequences[sequence_id] = sequence
        self.outputs[sequence_id] = list(output)
        self.scheduler.submit(sequence)
        return sequence_id

    def abort(self, sequence_id: int) -> bool:
        return self.scheduler.abort(sequence_id, self.now_s)

    @property
    def can_step(self) -> bool:
        """Whether something runs, is in flight, or may be admitted."""
        return bool(self.in_flight or self.scheduler.running or self.scheduler.waiting.num_ready)

    def schedule(self) -> tuple[StepPlan, StepResult] | None:
        """The first half of a step, so that a test can do something while it is in flight."""
        plan = self.scheduler.schedule(self.now_s)
        if plan is None:
            return None
        self.plans.append(plan)
        self.tokens_computed += plan.num_tokens
        limits = self.scheduler.limits
        assert plan.num_tokens <= limits.max_step_tokens or (limits.indivisible and len(plan.steps) == 1)
        for index in plan.runs:
            step = plan.steps[index]
            last = self.sequences[step.sequence_id].last_to_compute
            assert step.num_computed + step.num_new <= last, "a run goes past max_tokens"
        samples = [plan.runs[i].num_new + 1 if i in plan.runs else step.samples for i, step in enumerate(plan.steps)]
        load = self.scheduler.loads[plan.step_id]
        assert load.num_tokens == plan.num_tokens + plan.num_padding
        num_left_out = sum(run.num_new + 1 - run.num_samples for run in plan.runs.values())  # at forced tokens
        assert load.num_sampled == sum(samples) - num_left_out
        assert sum(samples) <= self.scheduler.limits.max_running_requests, "runners have room for no more"
        assert len(self.scheduler.running) <= self.scheduler.limits.max_running_requests
        self.executor.forward(plan)
        while plan.needs_host and self.in_flight:  # as the engine does
            self.commit(*self.in_flight.popleft())
        return plan, self.executor.sample(plan, self.scheduler.masks(plan))

    def commit(self, plan: StepPlan, result: StepResult) -> list[StepOutput]:
        self.now_s += 1.0
        self.committed = step_outputs = self.scheduler.commit(plan, result, self.now_s)
        self.scheduler.check_integrity()
        plain = zip(step_outputs.handles, step_outputs.token_ids, strict=True)
        outputs = [*step_outputs.special, *(StepOutput(handle, [token_id]) for handle, token_id in plain)]
        for item in outputs:
            assert item.sequence_id not in self.finished, "an output after the end"
            self.outputs[item.sequence_id] += item.token_ids
            self.logprobs.setdefault(item.sequence_id, []).extend(item.logprobs)
            if item.prompt is not None:
                self.cached[item.sequence_id] = item.prompt.cached_tokens
                self.prompt_logprobs[item.sequence_id] = item.prompt.logprobs
            if item.whole is not None:
                self.wholes[item.sequence_id] = item.whole
            if item.finish is not None:
                self.finished[item.sequence_id] = item.finish
        return outputs

    def step(self) -> list[StepOutput]:
        """Schedules a step, and commits the oldest one if more than `run_ahead` are in flight then."""
        scheduled = self.schedule()
        if scheduled is not None:
            self.in_flight.append(scheduled)
        assert self.in_flight, "there was nothing to compute"
        if scheduled is not None and len(self.in_flight) <= self.run_ahead:
            return []
        return self.commit(*self.in_flight.popleft())

    def run(self, most_steps: int = 10_000) -> None:
        """Steps until nothing is left."""
        for _ in range(most_steps):
            if not self.scheduler.has_work and not self.in_flight:
                return
            self.step()
        raise AssertionError(f"not done after {most_steps} steps")
