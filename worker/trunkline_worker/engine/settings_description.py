"""What follows from the settings of an engine alone, whatever its model."""

import torch

from trunkline.v1.worker_pb2 import GetModelResponse
from trunkline_worker.scheduler.limits import AdmissionRule, Batching, SchedulerLimits
from trunkline_worker.settings import EngineSettings

# Of the memory that is free once the model is loaded. A host runs other programs too, such as other workers.
KV_MEMORY_FRACTION = {"cuda": 0.9, "cpu": 0.25}
# A CPU multiplies many rows at a higher rate, and no stream waits for the steps of a model that pools.
STEP_TARGET_MS, POOLED_STEP_TARGET_MS = 100.0, 500.0


def kv_memory_fraction(settings: EngineSettings, device: torch.device) -> float:
    """The part of the free memory that the KV pool takes, unless the number of its blocks is set."""
    return settings.kv_memory_fraction or KV_MEMORY_FRACTION[device.type]


def step_target_ms(settings: EngineSettings, *, is_pooled: bool) -> float:
    """The target time of a step; 0: none.  is_pooled: the model embeds or scores"""
    if settings.itl_target_ms is not None:
        return settings.itl_target_ms
    return POOLED_STEP_TARGET_MS if is_pooled else STEP_TARGET_MS


def description_of_settings(
    settings: EngineSettings, device: torch.device, *, num_blocks: int, block_size: int, is_pooled: bool
) -> GetModelResponse:
    """What clients and routers are told of the settings."""
    return GetModelResponse(
        kv_token_capacity=num_blocks * block_size,
        block_size=block_size,
        kv_blocks=num_blocks,
        max_step_tokens=settings.max_step_tokens,
        max_running_requests=min(settings.max_running_requests, settings.max_step_tokens),
        max_waiting_requests=settings.max_waiting_requests,
        max_waiting_tokens=settings.max_waiting_tokens,
        itl_target_ms=step_target_ms(settings, is_pooled=is_pooled),
        kv_memory_fraction=0.0 if settings.kv_blocks else kv_memory_fraction(settings, device),
        interactive_reserve=settings.interactive_reserve,
        batching=settings.batching,
        admission=settings.admission,
        aging_s=settings.aging_s,
        price_per_hour=settings.price_per_hour,
        batch_size=settings.batch_size,
        batch_window_ms=settings.batch_window_ms,
        device=device.type,
        deterministic=settings.deterministic,
    )


def scheduler_limits(
    settings: EngineSettings, *, is_pooled: bool = False, indivisible: bool = False
) -> SchedulerLimits:
    """The scheduler's part of the settings, in the scheduler's units."""
    return SchedulerLimits(
        max_step_tokens=settings.max_step_tokens,
        max_running_requests=settings.max_running_requests,
        max_waiting_requests=settings.max_waiting_requests,
        max_waiting_tokens=settings.max_waiting_tokens,
        itl_target_s=step_target_ms(settings, is_pooled=is_pooled) / 1e3,
        interactive_reserve=settings.interactive_reserve,
        aging_s=settings.aging_s,
        batching=Batching(settings.batching),
        batch_size=settings.batch_size,
        batch_window_s=settings.batch_window_ms / 1e3,
        admission=AdmissionRule(settings.admission),
        indivisible=indivisible,
    )
