"""Random lives of the scheduler: when sequences arrive, are aborted or do not fit, nothing is lost, mixed up or leaked.

The executor reads every sequence's history back through its block table, so one wrongly shared block is noticed in the
step that reads it (tests/worker/fake_executor.py).
"""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.worker.late_copies import CopyingRig
from tests.worker.rig import Rig
from trunkline.block_hash import packed_hash
from trunkline_worker.cache.sequence import AwaitedResource, Finish
from trunkline_worker.scheduler.limits import AdmissionRule, Batching
from trunkline_worker.step.lanes import Lane


def weak_hash(parent: bytes, packed: bytes) -> bytes:
    """A hash of 4 bits: nearly everything collides."""
    return bytes([packed_hash(parent, packed)[0] & 15])


RESOURCES = [AwaitedResource("grammar", b"a"), AwaitedResource("grammar", b"b"), AwaitedResource("adapter", b"a")]


class SchedulerLife(RuleBasedStateMachine):
    """Prompts come from a small alphabet, so that prefixes are shared, repeated and forged all the time. Sequences
    await resources from the start or later, which are there in any order, or fail."""

    hash_block = staticmethod(packed_hash)
    make_rig: type[Rig] = Rig

    @initialize(
        num_blocks=st.integers(2, 24),
        block_size=st.integers(1, 5),
        max_step_tokens=st.integers(1, 32),
        max_running=st.integers(1, 6),
        run_ahead=st.integers(0, 2),
        admission=st.sampled_from(AdmissionRule),
        interactive_reserve=st.sampled_from([0.0, 0.2, 0.5]),
        aging_s=st.sampled_from([3.0, 30.0]),
        aged_tokens=st.sampled_from([3, 256]),
        batching=st.sampled_from([Batching.CONTINUOUS] * 3 + [Batching.STATIC, Batching.STATIC_UNPADDED]),
        batch_size=st.integers(1, 5),
        itl_target_s=st.sampled_from([0.0, 0.5]),
    )
    def start(self, num_blocks: int, block_size: int, max_step_tokens: int, max_running: int, **limits: object) -> None:
        self.rig = self.make_rig(
            num_blocks=num_blocks,
            block_size=block_size,
            max_step_tokens=max_step_tokens,
            max_running=max_running,
            hash_block=self.hash_block,
            **limits,  # type: ignore[arg-type]
        )
        self.aborted: set[int] = set()
        self.lacking: dict[int, set[AwaitedResource]] = {}  # what each sequence still awaits

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=30),
        max_tokens=st.integers(1, 12),
        salt=st.sampled_from([b"", b"a"]),
        with_logprobs=st.booleans(),
        lane=st.sampled_from(Lane),
        tenant=st.sampled_from(["a", "b"]),
        weight=st.sampled_from([0.5, 1.0, 3.0]),
        within_s=st.sampled_from([None, None, 500.0]),
        awaits=st.one_of(st.just([]), st.lists(st.sampled_from(RESOURCES), max_size=2)),
    )
    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        with_logprobs: bool,
        awaits: list[AwaitedResource],
        **options: object,
    ) -> None:
        capacity = self.rig.blocks.num_blocks * self.rig.blocks.block_size
        if len(prompt) < capacity:
            if with_logprobs:
                options["prompt_logprobs"] = 0
            sequence_id = self.rig.submit(prompt, max_tokens, awaits=awaits, **options)  # type: ignore[arg-type]
            self.lacking[sequence_id] = set(awaits)

    @rule(pick=st.integers(0, 1 << 30), resource=st.sampled_from(RESOURCES))
    def await_resource(self, pick: int, resource: AwaitedResource) -> None:
        waiting = list(self.rig.scheduler.waiting)
        if waiting:
            sequence_id = waiting[pick % len(waiting)].sequence_id
            self.rig.scheduler.await_resource(sequence_id, resource, self.rig.now_s)
            self.lacking[sequence_id].add(resource)

    @rule(resource=st.sampled_from(RESOURCES))
    def ready(self, resource: AwaitedResource) -> None:
        self.rig.scheduler.ready(resource, self.rig.now_s)
        for lacking in self.lacking.values():
            lacking.discard(resource)

    @rule(resource=st.sampled_from(RESOURCES))
    def fails(self, resource: AwaitedResource) -> None:
        failed = {sequence.sequence_id for sequence in self.rig.scheduler.failed(resource, self.rig.now_s)}
        expected = {sequence_id for sequence_id, lacking in self.lacking.items() if resource in lacking}
        assert failed == expected - self.aborted
        self.aborted |= failed

    @rule(pick=st.integers(0, 1 << 30))
    def abort(self, pick: int) -> None:
        if self.rig.sequences:
            sequence_id = 1 + pick % len(self.rig.sequences)
            if self.rig.abort(sequence_id):
                self.aborted.add(sequence_id)

    @rule(steps=st.integers(1, 40))
    def steps(self, steps: int) -> None:
        for _ in range(steps):
            if self.rig.can_step:
                self.rig.step()

    @invariant()
    def holds_together(self) -> None:
        if hasattr(self, "rig"):
            self.rig.scheduler.check_integrity()
            for sequence in self.rig.scheduler.running:
                assert not self.lacking[sequence.sequence_id], "it runs without a resource that it awaits"
            for sequence in self.rig.scheduler.waiting:
                assert sequence.awaits == self.lacking[sequence.sequence_id]

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        for resource in RESOURCES:
            self.ready(resource)
        self.rig.run()
        assert set(self.rig.finished) | self.aborted == set(self.rig.sequences), "every sequence ends"
        assert not set(self.rig.finished) & self.aborted, "no sequence ends twice"
        assert self.rig.blocks.num_live == 0
        for sequence_id, finish in self.rig.finished.items():
            assert finish is Finish.LENGTH
            sequence = self.rig.sequences[sequence_id]
            assert len(self.rig.outputs[sequence_id]) == sequence.sampling.max_tokens


class ForgedHashes(SchedulerLife):
    """The same life when hashes prove nothing."""

    hash_block = staticmethod(weak_hash)


class LifeWithCopies(SchedulerLife):
    """The same life while blocks are copied."""

    make_rig = CopyingRig


TestSchedulerLife = SchedulerLife.TestCase
TestSchedulerLife.settings = settings(
    max_examples=40, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestForgedHashes = ForgedHashes.TestCase
TestForgedHashes.settings = TestSchedulerLife.settings
TestLifeWithCopies = LifeWithCopies.TestCase
TestLifeWithCopies.settings = TestSchedulerLife.settings


@pytest.mark.slow
@pytest.mark.parametrize("machine", [SchedulerLife, ForgedHashes, LifeWithCopies])
def test_long_lives(machine: type[SchedulerLife]) -> None:
    """The same in more lives, and longer ones."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=60,
            stateful_step_count=120,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )


@settings(max_examples=15, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=40), min_size=2, max_size=12),
    chunk=st.integers(1, 40),
    num_blocks=st.integers(20, 60),
)
def test_neighbours_cache_and_pool_never_change_what_a_sequence_generates(
    prompts: list[list[int]], chunk: int, num_blocks: int
) -> None:
    alone: list[list[int]] = []
    for prompt in prompts:
        rig = Rig(num_blocks=128, max_step_tokens=1024)
        rig.submit(prompt, max_tokens=10)
        rig.run()
        alone.append(rig.outputs[1])
    for hash_block in (packed_hash, weak_hash):
        rig = Rig(num_blocks=num_blocks, max_step_tokens=chunk, hash_block=hash_block)
        for prompt in prompts:
            rig.submit(prompt, max_tokens=10)
        rig.run()
        assert list(rig.outputs.values()) == alone


def test_thousands_of_steps_of_a_tight_pool_leave_nothing_behind() -> None:
    rig = Rig(num_blocks=30, max_step_tokens=24, max_running=8, admission=AdmissionRule.OPTIMISTIC)
    for n in range(400):
        rig.submit([(n * k) % 3 for k in range(1, 2 + n % 37)], max_tokens=1 + n % 50)
    rig.run(most_steps=20_000)
    assert len(rig.plans) > 1000
    assert rig.stats.preemptions > 0
    assert len(rig.finished) == 400
    assert rig.blocks.num_live == 0
