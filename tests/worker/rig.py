"""A scheduler before an executor that checks it: what the tests of the engine's core drive."""

from collections.abc import Callable, Sequence

from tests.worker.fake_executor import HistoryExecutor
from trunkline.block_hash import block_hash
from trunkline_worker.blocks import KVBlocks
from trunkline_worker.plan import Sampling, StepPlan, StepResult
from trunkline_worker.prefix_tree import PrefixTree
from trunkline_worker.scheduler import Scheduler, SchedulerLimits, SequenceNews
from trunkline_worker.sequence import Finish
from trunkline_worker.sequence import Sequence as EngineSequence

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
        max_waiting: int = 1000,
        hash_block: Callable[[bytes, Sequence[int]], bytes] = block_hash,
    ) -> None:
        self.tree = PrefixTree("model", block_size, hash_block)
        self.blocks = KVBlocks(num_blocks, self.tree)
        self.scheduler = Scheduler(SchedulerLimits(max_step_tokens, max_running, max_waiting), self.blocks)
        self.executor = HistoryExecutor(num_blocks=num_blocks, block_size=block_size)
        self.sequences: dict[int, EngineSequence] = {}
        self.outputs: dict[int, list[int]] = {}
        self.finished: dict[int, Finish] = {}
        self.cached: dict[int, int] = {}
        self.plans: list[StepPlan] = []
        self.tokens_computed = 0

    def submit(self, prompt: list[int], max_tokens: int = 8, *, output: Sequence[int] = (), **options: object) -> int:
        """A new sequence; `output` is what it has generated elsewhere already."""
        sequence_id = len(self.sequences) + 1
        salt = options.pop("salt", b"")
        assert isinstance(salt, bytes)
        room = self.blocks.num_blocks * self.blocks.block_size - len(prompt)
        sampling = Sampling(max_tokens=min(max_tokens, room), **options)  # type: ignore[arg-type]
        sequence = EngineSequence(
            sequence_id, [*prompt, *output], len(prompt), sampling, self.tree.root(salt), arrival=sequence_id
        )
        self.sequences[sequence_id] = sequence
        self.outputs[sequence_id] = list(output)
        self.scheduler.submit(sequence)
        return sequence_id

    def schedule(self) -> tuple[StepPlan, StepResult] | None:
        """The first half of a step, so that a test can do something while it is in flight."""
        plan = self.scheduler.schedule()
        if plan is None:
            return None
        self.plans.append(plan)
        self.tokens_computed += plan.num_tokens
        assert plan.num_tokens <= self.scheduler.limits.max_step_tokens
        assert len(self.scheduler.running) <= self.scheduler.limits.max_running_requests
        self.executor.forward(plan)
        return plan, self.executor.sample(plan)

    def commit(self, plan: StepPlan, result: StepResult) -> list[SequenceNews]:
        news = self.scheduler.commit(plan, result)
        self.scheduler.check_integrity()
        for item in news:
            assert item.sequence_id not in self.finished, "news after the end"
            self.outputs[item.sequence_id] += item.token_ids
            if item.prompt is not None:
                self.cached[item.sequence_id] = item.prompt.cached_tokens
            if item.finish is not None:
                self.finished[item.sequence_id] = item.finish
        return news

    def step(self) -> list[SequenceNews]:
        scheduled = self.schedule()
        assert scheduled is not None, "there was nothing to compute"
        return self.commit(*scheduled)

    def run(self, most_steps: int = 10_000) -> None:
        """Steps until nothing is left."""
        for _ in range(most_steps):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError(f"not done after {most_steps} steps")
