"""The memory that the largest step needs beside the model and the KV pool, measured before the pool is sized."""

import torch

from trunkline_worker.engine.step_runner import step_runner
from trunkline_worker.model.loading import LoadedModel
from trunkline_worker.settings import EngineSettings
from trunkline_worker.step.plan import Sampling, SequenceStart, SequenceStep, StepPlan


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
    peak -= num_blocks * model.kv_bytes_per_block(settings.block_size)
    # With a larger pool, rows are as long as the context; tokens and block numbers take four bytes.
    peak += 4 * len(plan.starts) * model.context_length * (settings.block_size + 1) // settings.block_size
    del runner
    torch.cuda.empty_cache()
    return peak
