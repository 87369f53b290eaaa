"""Steps that an engine computes before its first request.

The largest step shows how much memory a step needs beside the model and the KV pool, before the pool is sized. The
rehearsal shows the scheduler how fast steps are: without it the first requests would be computed in small steps,
because nothing is known of larger ones, and would wait for all that is initialised with the first use.
"""

from collections.abc import Iterator

import torch

from trunkline_worker.engine.step_runner import step_runner
from trunkline_worker.model.loading import LoadedModel
from trunkline_worker.runner.step_thread import StepRunner, timed_step
from trunkline_worker.scheduler.limits import SchedulerLimits
from trunkline_worker.scheduler.step_cost import StepCost, StepLoad, chunk_pairs
from trunkline_worker.settings import EngineSettings
from trunkline_worker.step.plan import Sampling, SequenceStart, SequenceStep, StepPlan

LEAST_TOKENS = 16
GROWTH = 4  # of a step relative to the one before it
LONGEST_S = 0.1  # no larger step follows one that took so long
GREEDY = Sampling(max_tokens=1, temperature=0.0)


def largest_step(settings: EngineSettings, context_length: int) -> StepPlan:
    """A step with the largest number of tokens and samples, and with all sampling options that take memory. As many
    choices as may run share its tokens."""
    count = min(settings.max_running_requests, settings.max_step_tokens)
    most = settings.max_step_tokens
    lengths = [min(context_length - 1, (most + index) // count) for index in range(count)]
    starts, steps, block = [], [], 0
    for index, length in enumerate(lengths):
        num_blocks = -(-length // settings.block_size)
        table = list(range(block, block + num_blocks))
        block += num_blocks
        sampling = Sampling(
            max_tokens=1,
            seed=index,
            temperature=1.0,
            top_p=0.9,
            repetition_penalty=1.1,
            logit_bias=((0, 0.5),),
            logprobs=1,
        )
        starts.append(SequenceStart(index, [0] * length, length, table, sampling))
        steps.append(SequenceStep(index, 0, 0, length, (), True))
    return StepPlan(0, steps, starts=starts)


def activation_bytes(model: LoadedModel, settings: EngineSettings) -> int:
    """Bytes of device memory that the largest step takes temporarily. On a CPU 0: there the pool takes only a small
    fraction of the free memory, and one such step of a large model lasts minutes.
    """
    if model.device.type != "cuda":
        return 0
    plan = largest_step(settings, model.context_length)
    num_blocks = sum(len(start.block_table) for start in plan.starts)
    torch.cuda.synchronize(model.device)
    before = torch.cuda.memory_allocated(model.device)
    runner = step_runner(model, settings, num_blocks=num_blocks)
    torch.cuda.reset_peak_memory_stats(model.device)
    runner.begin(plan)()
    torch.cuda.synchronize(model.device)
    peak = torch.cuda.max_memory_allocated(model.device) - before
    peak += runner.later_bytes
    peak -= num_blocks * model.block_format(settings.block_size).num_bytes
    # With a larger pool, rows are as long as the context; tokens and block numbers take four bytes.
    peak += 4 * len(plan.starts) * model.context_length * (settings.block_size + 1) // settings.block_size
    del runner
    torch.cuda.empty_cache()
    return peak


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
    target time of a step or LONGEST_S; after each prompt, its last token again, as a decode does. Tells the cost model
    of each. Writes to blocks from 0 on, which no sequence has yet."""
    longest_s = min(limits.itl_target_s or LONGEST_S, LONGEST_S)
    most_sequences = min(limits.max_running_requests, limits.max_step_tokens, num_blocks)
    most_tokens = min(limits.max_step_tokens, context_length - 1, num_blocks * block_size)

    def observed_s(count: int, length: int, num_computed: int = 0) -> float:
        """Computes sequences of this length but for their first tokens, and tells the cost model of the step."""
        plan = _plan(count, length, num_computed, block_size)
        time_s = (runner.begin(plan)() if runner.queues else timed_step(runner, plan)).device_time_s
        runner.forget(list(range(count)))
        cost.observe(_load(count, length, num_computed), time_s, is_rehearsed=True)
        return time_s

    timed_step(runner, _plan(1, 1, 0, block_size))  # what is initialised with the first use is not a cost of steps
    runner.forget([0])
    for count in _growing(1, most_sequences):
        if observed_s(count, 1) > longest_s:
            break
    for length in _growing(LEAST_TOKENS, most_tokens):
        time_s = observed_s(1, length)
        observed_s(1, length, length - 1)
        if time_s > longest_s:
            break


def _growing(first: int, most: int) -> Iterator[int]:
    """`first`, GROWTH times it, and so on up to `most`, which comes last."""
    while first < most:
        yield first
        first *= GROWTH
    yield most


def _plan(count: int, length: int, num_computed: int, block_size: int) -> StepPlan:
    """A step of `count` new sequences, each of `length` tokens and in blocks of its own, which have the KV of the first
    `num_computed`."""
    num_blocks = -(-length // block_size)
    tables = [list(range(index * num_blocks, (index + 1) * num_blocks)) for index in range(count)]
    starts = [SequenceStart(index, [0] * length, length, table, GREEDY) for index, table in enumerate(tables)]
    steps = [SequenceStep(index, 0, num_computed, length - num_computed, (), True) for index in range(count)]
    return StepPlan(0, steps, starts)


def _load(count: int, length: int, num_computed: int) -> StepLoad:
    if length - num_computed == 1:
        return StepLoad(count, count * length, 0.0, count, num_sampled=count)
    return StepLoad(length, 0, chunk_pairs(length, 0), 1, 0, length, length, 1)
