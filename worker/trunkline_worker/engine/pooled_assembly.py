"""Puts the parts of an engine together for an encoder, and describes models of vectors and scores."""

import time
from collections.abc import Callable

import torch

from trunkline.v1.worker_pb2 import Capability, GetModelResponse, PoolingActivation, PoolingModel, Task
from trunkline_worker.cache.blocks import KVBlocks
from trunkline_worker.cache.prefix_tree import PrefixTree
from trunkline_worker.engine.engine import Engine, ModelLimits
from trunkline_worker.engine.rehearsal import rehearse
from trunkline_worker.engine.settings_description import description_of_settings, scheduler_limits
from trunkline_worker.engine.step_runner import executor_for
from trunkline_worker.model.checkpoint.refusals import ModelError
from trunkline_worker.model.encoders.encoder_loading import LoadedEncoder
from trunkline_worker.model.pooling.pooling_spec import PoolingSpec
from trunkline_worker.runner.pooling_runner import EncoderStates, PoolingRunner
from trunkline_worker.scheduler.scheduler import Scheduler
from trunkline_worker.scheduler.stats import EngineStats
from trunkline_worker.settings import EngineSettings

# Settings that have no meaning for an encoder, with the values that ask for nothing.
OF_DECODERS: dict[str, tuple[object, ...]] = {
    "quantization": ("none",),
    "kv_dtype": ("auto",),
    "kv_blocks": (None,),
    "load_format": ("auto",),
}


def check_encoder_settings(settings: EngineSettings) -> None:
    """Raises ModelError if a setting asks for what an encoder does not have."""
    for name, neutral in OF_DECODERS.items():
        value = getattr(settings, name)
        if value not in neutral:
            raise ModelError(f"{name}={value} is for decoders, and this model is an encoder: leave it out")


def build_encoder_engine(
    settings: EngineSettings,
    model: LoadedEncoder,
    device: torch.device,
    report: Callable[[str], None] | None = None,
) -> tuple[Engine, GetModelResponse]:
    """An engine for an encoder, and its description without the worker's names.

    An encoder keeps nothing of a text, so it has no KV pool. The scheduler's blocks stand for places of running texts:
    one holds any text, and because none is ever full, no prefix is cached.

    report: called with the progress of the rehearsal; None: there is none
    """
    context = model.context_length
    num_blocks, block_size = 2 * settings.max_running_requests, context + 1
    limits = scheduler_limits(settings, is_pooled=True, indivisible=True)
    blocks = KVBlocks(num_blocks, PrefixTree(model.fingerprint, block_size))
    scheduler = Scheduler(limits, blocks, EngineStats(time.perf_counter()))
    runner = PoolingRunner(EncoderStates(model.encoder, device), model.head)
    executor = executor_for(runner, settings, device.type)
    if report is not None:
        report("measuring what steps cost")
        rehearse(runner, scheduler.cost, limits, context_length=context, num_blocks=num_blocks, block_size=block_size)
    engine = Engine(
        scheduler,
        executor,
        ModelLimits(context, frozenset()),
        clock_s=time.perf_counter,
        price_per_hour=settings.price_per_hour,
    )
    description = description_of_settings(
        settings, device, num_blocks=num_blocks, block_size=block_size, is_pooled=True
    )
    description.fingerprint = model.fingerprint
    description.architecture = model.spec.architecture
    description.vocab_size = model.spec.sizes.vocab_size
    description.context_length = context
    description.run_ahead = executor.run_ahead
    description.dtype = str(model.dtype).removeprefix("torch.")
    describe_pooling(description, model.pooling, model.spec.sizes.hidden)
    return engine, description


def describe_pooling(description: GetModelResponse, spec: PoolingSpec, hidden: int) -> None:
    """Says in a description that the model's outputs are vectors or scores.  hidden: components of a state"""
    makes_scores = bool(spec.labels)
    description.task = Task.TASK_SCORE if makes_scores else Task.TASK_EMBED
    description.capabilities[:] = [Capability.CAPABILITY_SCORES if makes_scores else Capability.CAPABILITY_VECTORS]
    description.ClearField("default_sampling")
    description.pooling.CopyFrom(
        PoolingModel(
            dimensions=0 if makes_scores else spec.dimensions(hidden),
            offered_dimensions=spec.offered_dimensions,
            any_dimensions=spec.any_dimensions,
            prompts=dict(spec.prompts),
            default_prompt=spec.default_prompt,
            labels=spec.labels,
            pair_template=spec.pair_template,
            default_instruction=spec.default_instruction,
            activation=PoolingActivation.Value(spec.activation.value),
        )
    )
