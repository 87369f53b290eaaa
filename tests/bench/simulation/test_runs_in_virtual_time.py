"""Runs, masks and copies of blocks on the simulated executor: sequences get what they would get one by one."""

from functools import partial

import pytest

from tests.worker.late_copies import chain_of
from tests.worker.scheduling.maskers import Climbing
from tests.worker.scheduling.proposers import RandomProposer
from trunkline.engine.v1.engine_pb2 import EngineStep
from trunkline_bench.simulation.costs.device_profile import PROFILES
from trunkline_bench.simulation.traces.workload import mixed_lengths, poisson
from trunkline_bench.simulation.worker.simulated_executor import END_TOKEN, FIRST_TOKEN
from trunkline_bench.simulation.worker.simulated_worker import SimulatedWorker, WorkerSpec, submit_of
from trunkline_worker.cache.sequence import Sequence
from trunkline_worker.engine.messages import Prompt
from trunkline_worker.scheduler.limits import SchedulerLimits

LIMITS = SchedulerLimits(max_step_tokens=512, max_running_requests=24, itl_target_s=0.05)
REQUESTS = poisson(12, 40.0, mixed_lengths, seed=2)
LENGTHS = {handle: request.output_tokens for handle, request in enumerate(REQUESTS)}


def expected(handle: int) -> list[int]:
    return [FIRST_TOKEN] * (LENGTHS[handle] - 1) + [END_TOKEN]


def continuation(sequence: Sequence) -> list[int]:
    return expected(sequence.sequence_id)[sequence.num_output :]


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("late", [None, 0.2])
def test_random_runs_change_no_output(run_ahead: int, late: float | None) -> None:
    spec = WorkerSpec(PROFILES["h200-8b"], 1500, 16, LIMITS, context_length=16_000, run_ahead=run_ahead, host_s=0.0005)
    found: dict[int, list[int]] = {handle: [] for handle in LENGTHS}

    def on_step(now_s: float, step: EngineStep) -> None:
        for handle, token_id in zip(step.token_handles, step.token_ids, strict=True):
            found[handle].append(token_id)
        for output in step.outputs:
            found[output.handle] += output.token_ids

    worker = SimulatedWorker(spec, on_step)
    scheduler = worker.engine.scheduler
    scheduler.runs.proposer = RandomProposer(continuation, 5, seed=1)
    if late is not None:
        scheduler.masker = Climbing(5, late=late)
    for handle, request in enumerate(REQUESTS):
        prompt = partial(Prompt, request.prompt())
        worker.submit(request.arrival_s, submit_of(handle, request), prompt, request.output_tokens)
    worker.advance(float("inf"))
    scheduler.check_integrity()
    assert found == {handle: expected(handle) for handle in LENGTHS}
    assert scheduler.stats.output_tokens == sum(LENGTHS.values())
    decoded = scheduler.stats.total.decode_tokens
    assert decoded > sum(LENGTHS.values()), "drafts that were not taken were computed, too"


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_blocks_are_copied_while_equal_steps_are_computed_at_once(run_ahead: int) -> None:
    spec = WorkerSpec(PROFILES["h200-8b"], 1500, 16, LIMITS, context_length=16_000, run_ahead=run_ahead)
    worker = SimulatedWorker(spec, lambda now_s, step: None)
    scheduler = worker.engine.scheduler
    request = REQUESTS[0]
    worker.submit(0.0, submit_of(0, request), partial(Prompt, request.prompt()), 500)
    worker.advance(1.0)
    longest = max((chain_of(node) for node in scheduler.blocks.tree.nodes.values()), key=len)
    scheduler.copies.begin(longest, 0)
    worker.advance(2.0)
    assert worker.has_work, "it decodes for longer than that"
    assert not scheduler.copies.has_any
    assert all(len(node.copies) == 2 for node in longest)
