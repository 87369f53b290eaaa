"""Steps that an engine computes before its first request, so that its scheduler knows how fast steps are.

Without them the first requests would be computed in small steps, because nothing is known of larger ones, and would
wait for all that is initialised with the first use.
"""

from collections.abc import Iterator

from trunkline_worker.runner.step_thread import StepRunner, timed_step
from trunkline_worker.scheduler.limits import SchedulerLimits
from trunkline_worker.scheduler.step_cost import StepCost, StepLoad, chunk_pairs
from trunkline_worker.step.plan import Sampling, SequenceStart, SequenceStep, StepPlan

LEAST_TOKENS = 16
GROWTH = 4  # of a step relative to the one before it
LONGEST_S = 0.1  # no larger step follows one that took so long
GREEDY = Sampling(max_tokens=1, temperature=0.0)


def rehearse(
    runner: StepRunner,
    cost: StepCost,
    limits: SchedulerLimits,
    *,
    context_length: int,
    num_blocks: int,
    block_size: int,
) -> None:
    """Computes batches of decodes and then prompts, each GROWTH times as large as the one before, until one takes the
    target time of a step or LONGEST_S. Tells the cost model of each. Writes to blocks from 0 on, which no sequence has
    yet."""
    longest_s = min(limits.itl_target_s or LONGEST_S, LONGEST_S)
    most_sequences = min(limits.max_running_requests, limits.max_step_tokens, num_blocks)
    most_tokens = min(limits.max_step_tokens, context_length - 1, num_blocks * block_size)
    _step_s(runner, _plan(1, 1, block_size))  # what is initialised with the first use is not a cost of steps
    runner.forget([0])
    for sizes in (
        [(count, 1) for count in _growing(1, most_sequences)],
        [(1, length) for length in _growing(LEAST_TOKENS, most_tokens)],
    ):
        for count, length in sizes:
            time_s = _step_s(runner, _plan(count, length, block_size))
            runner.forget(list(range(count)))
            cost.observe(_load(count, length), time_s)
            if time_s > longest_s:
                break


def _step_s(runner: StepRunner, plan: StepPlan) -> float:
    """Computes a step, and returns its time as the runner's executor measures it."""
    return (runner.begin(plan)() if runner.queues else timed_step(runner, plan)).device_time_s


def _growing(first: int, most: int) -> Iterator[int]:
    """`first`, GROWTH times it, and so on up to `most`, which comes last."""
    while first < most:
        yield first
        first *= GROWTH
    yield most


def _plan(count: int, length: int, block_size: int) -> StepPlan:
    """A step of `count` new sequences, each of `length` tokens and in blocks of its own."""
    num_blocks = -(-length // block_size)
    tables = [list(range(index * num_blocks, (index + 1) * num_blocks)) for index in range(count)]
    starts = [SequenceStart(index, [0] * length, length, table, GREEDY) for index, table in enumerate(tables)]
    return StepPlan(0, [SequenceStep(index, 0, 0, length, (), True) for index in range(count)], starts)


def _load(count: int, length: int) -> StepLoad:
    if length == 1:
        return StepLoad(count, count, 0.0, count, num_sampled=count)
    return StepLoad(length, 0, chunk_pairs(length, 0), 1, 0, length, length, 1)
