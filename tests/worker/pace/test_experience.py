"""A worker that does not know its device yet: steps stay short, and still grow as large as their time allows."""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trunkline_worker.cache.blocks import KVBlocks
from trunkline_worker.cache.prefix_tree import PrefixTree
from trunkline_worker.cache.sequence import Sequence
from trunkline_worker.scheduler.limits import SchedulerLimits
from trunkline_worker.scheduler.scheduler import Scheduler
from trunkline_worker.scheduler.stats import EngineStats
from trunkline_worker.scheduler.step_budget import LEAST_CHUNK
from trunkline_worker.scheduler.step_cost import MOST_PAIR_SHARE, STEPS_PER_FIT, Experience, Size
from trunkline_worker.step.lanes import Lane
from trunkline_worker.step.plan import Sampling, StepResult

TARGET_S = 0.1
# Tokens, pairs and sequences are each bounded.
MOST_TARGETS = 1.5


class Device(NamedTuple):
    fixed_s: float
    token_s: float
    pair_s: float
    sequence_s: float = 0.0
    first_times: tuple[float, ...] = ()  # what the first steps take, as multiples


class Worker:
    """A scheduler with a device that computes nothing and takes its time."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.tree = PrefixTree("model", 16)
        limits = SchedulerLimits(max_step_tokens=1 << 14, max_running_requests=256, itl_target_s=TARGET_S)
        self.scheduler = Scheduler(limits, KVBlocks(1 << 13, self.tree), EngineStats(0.0))
        self.now_s = 0.0
        self.times_s: list[float] = []  # of all steps
        self.tokens: list[int] = []
        self.num_submitted = 0

    def submit(self, prompt: int, output: int) -> None:
        """Submits a request with a prompt of this many tokens, of which the first is unique."""
        self.num_submitted += 1
        number, account = self.num_submitted, self.scheduler.waiting.lanes[Lane.STANDARD].account("", 1.0)
        sampling = Sampling(max_tokens=output)
        tokens = [number] + [0] * (prompt - 1)
        self.scheduler.submit(
            Sequence(
                number, tokens, prompt, sampling, self.tree.root(b""), arrival=number, account=account,
                arrival_s=self.now_s, deadline_s=None,
            )
        )  # fmt: skip

    def steps(self, most: int) -> None:
        """Runs this many steps, or fewer if no work is left."""
        for _ in range(most):
            plan = self.scheduler.schedule(self.now_s)
            if plan is None:
                assert not self.scheduler.has_work, "it is stuck"
                return
            load, device, number = self.scheduler.loads[plan.step_id], self.device, len(self.times_s)
            time_s = device.fixed_s + device.token_s * load.num_tokens + device.pair_s * load.chunk_pairs
            time_s += device.sequence_s * load.num_sequences
            if number < len(device.first_times):
                time_s *= device.first_times[number]
            self.times_s.append(time_s)
            self.tokens.append(load.num_tokens)
            self.now_s += time_s
            tokens = [1 if step.samples else None for step in plan.steps]
            self.scheduler.commit(plan, StepResult(plan.step_id, tokens, device_time_s=time_s), self.now_s)


DEVICES = {
    "GPU": Device(8e-3, 2e-5, 2e-10),
    "GPU that compiles in its first steps": Device(8e-3, 2e-5, 2e-10, first_times=(300.0, 90.0, 1.0, 60.0, 1.0, 30.0)),
    "CPU": Device(5e-3, 113e-6, 5e-9),
    "CPU with dear pairs": Device(1e-3, 2e-4, 3e-6),
    "CPU with dear sequences": Device(3e-3, 1e-4, 0.0, sequence_s=3e-4),
}


def flooded(worker: Worker, *, prompt: int, output: int, count: int = 100) -> Worker:
    for _ in range(count):
        worker.submit(prompt, output)
    return worker


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize(("prompt", "output"), [(1000, 8), (32, 64), (6000, 1)])
def test_no_step_of_a_worker_that_knows_nothing_is_longer_than_its_target(kind: str, prompt: int, output: int) -> None:
    device = DEVICES[kind]
    worker = flooded(Worker(device), prompt=prompt, output=output)
    worker.steps(2 * STEPS_PER_FIT)
    assert max(worker.times_s[len(device.first_times) :]) <= MOST_TARGETS * TARGET_S
    assert max(worker.times_s[-STEPS_PER_FIT:]) >= 0.5 * TARGET_S or output > 8, "steps are filled in the end"


@pytest.mark.parametrize("kind", DEVICES)
def test_steps_are_filled_after_a_few_long_before_a_fit_is_made_of_them(kind: str) -> None:
    device = DEVICES[kind]
    worker = flooded(Worker(device), prompt=1000, output=2)
    worker.steps(len(device.first_times) + 8)
    assert not worker.scheduler.cost.is_known
    assert max(worker.times_s[len(device.first_times) :]) >= 0.5 * TARGET_S


@pytest.mark.parametrize("kind", DEVICES)
def test_requests_of_a_few_tokens_do_not_make_a_worker_bold(kind: str) -> None:
    worker = Worker(DEVICES[kind])
    for _ in range(3 * STEPS_PER_FIT):
        worker.submit(5, 1)
        worker.steps(2)
    assert worker.scheduler.cost.is_known
    before = len(worker.times_s)
    flooded(worker, prompt=1000, output=4)
    worker.steps(2 * STEPS_PER_FIT)
    assert max(worker.times_s[before:]) <= MOST_TARGETS * TARGET_S


@given(
    fixed_s=st.floats(1e-4, 0.05),
    token_s=st.floats(1e-6, 1e-3),
    pair_share=st.floats(0.0, MOST_PAIR_SHARE),
    floods=st.lists(st.tuples(st.integers(2, 3000), st.integers(1, 20), st.integers(1, 60)), min_size=1, max_size=3),
    first_times=st.lists(st.floats(1.0, 300.0), max_size=6),
)
@settings(max_examples=12, deadline=None)
def test_whatever_the_device_and_the_prompts_no_step_takes_twice_its_target(
    fixed_s: float, token_s: float, pair_share: float, floods: list[tuple[int, int, int]], first_times: list[float]
) -> None:
    device = Device(fixed_s, token_s, pair_share * token_s, first_times=tuple(first_times))
    worker = Worker(device)
    for prompt, output, count in floods:
        flooded(worker, prompt=prompt, output=output, count=count)
        worker.steps(40)
    for time_s, tokens in list(zip(worker.times_s, worker.tokens, strict=True))[len(first_times) :]:
        assert time_s <= 2 * TARGET_S or tokens <= LEAST_CHUNK + worker.scheduler.limits.max_running_requests


def test_a_step_that_was_slow_by_accident_makes_no_later_one_smaller() -> None:
    experience = Experience()
    experience.observe(Size(100, 0, 1), 0.01)
    before = experience.room(TARGET_S, 64)
    experience.observe(Size(100, 0, 1), 5.0)
    assert experience.room(TARGET_S, 64) == before == (1000, 64_000)


def fitted(experience: Experience, *steps: tuple[Size, float, float]) -> None:
    """steps: their sizes, times and fitted times"""
    sizes, times_s, fitted_s = zip(*steps, strict=True)
    experience.fitted(np.array(sizes, float), np.array(times_s), np.array(fitted_s))


def test_a_fit_is_relied_on_only_where_it_explains_a_step_at_least_half_as_large() -> None:
    experience = Experience()
    fitted(experience, (Size(100, 50, 9), 0.01, 0.01), (Size(1000, 900, 3), 0.3, 0.02), (Size(2, 0, 2), 0.01, 0.01))
    assert experience.trusted == (200, 100, 4), "only steps of decodes show what sequences cost"


def test_a_speed_that_a_device_no_longer_reaches_is_forgotten() -> None:
    experience = Experience()
    experience.observe(Size(1000, 0, 1), 0.01)
    for _ in range(40):
        fitted(experience, (Size(10, 0, 1), 0.01, 0.01))
    tokens, _ = experience.room(TARGET_S, 64)
    assert 100 <= tokens < 200
