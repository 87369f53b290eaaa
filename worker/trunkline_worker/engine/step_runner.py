"""Chooses the runner for a model's decoder, and the executor for a runner."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from trunkline_worker.model.cpu_decoder import CpuDecoder
from trunkline_worker.model.decoder import Decoder
from trunkline_worker.model.loading import LoadedModel
from trunkline_worker.runner.pooling_runner import DecoderStates, PoolingRunner
from trunkline_worker.runner.step_thread import InlineExecutor, QueueingExecutor, StepRunner, ThreadedExecutor
from trunkline_worker.runner.torch_runner import TorchRunner
from trunkline_worker.settings import EngineSettings


class OwnGpu(NamedTuple):
    """Its names; empty on a CPU."""

    name: str = ""  # as torch reports it
    uuid: str = ""  # of the GPU, or of the part of a divided one (MIG), without a prefix


def own_gpu(device: torch.device) -> OwnGpu:
    """The names of a device. NVML counts devices in another order than CUDA, so only the UUID says which one it is."""
    if device.type != "cuda":
        return OwnGpu()
    return OwnGpu(torch.cuda.get_device_name(device), str(torch.cuda.get_device_properties(device).uuid))


def step_runner(
    model: LoadedModel,
    settings: EngineSettings,
    *,
    num_blocks: int,
    report: Callable[[str], None] | None = None,
) -> StepRunner:
    """A runner with a KV pool of `num_blocks` blocks.

    report: called with the progress of warming up, which takes seconds to minutes on a GPU; None: no warm-up
    """
    is_on_host = isinstance(model.decoder, CpuDecoder | Decoder)
    if is_on_host and model.head is not None:
        states = DecoderStates(model, model.kv_pool(num_blocks, settings.block_size), settings.block_size)
        return PoolingRunner(states, model.head)
    if is_on_host:
        return TorchRunner(model, num_blocks=num_blocks, block_size=settings.block_size)
    # Triton is not available on every system.
    from trunkline_worker.runner.gpu.gpu_runner import GpuRunner
    from trunkline_worker.runner.gpu.pooling_gpu_runner import PoolingGpuRunner

    kind = GpuRunner if model.head is None else PoolingGpuRunner
    runner = kind(model, settings, num_blocks=num_blocks)
    if report is not None:
        runner.warm_up(report)
    return runner


def executor_for(
    runner: StepRunner, settings: EngineSettings, device_type: str
) -> InlineExecutor | QueueingExecutor | ThreadedExecutor:
    """The executor that suits a runner. By default only a GPU is given a step while another one runs."""
    run_ahead = settings.run_ahead if settings.run_ahead is not None else int(device_type == "cuda")
    if runner.queues:
        return QueueingExecutor(runner, run_ahead)
    return ThreadedExecutor(runner, run_ahead) if run_ahead else InlineExecutor(runner)
