"""The least time of each step: what its bytes and operations take at the device's peak rates."""

from typing import NamedTuple

from trunkline_worker.model.architectures.decoder_spec import DecoderSpec
from trunkline_worker.scheduler.step_cost import StepLoad
from trunkline_worker.step.model_work import (
    Attended,
    ModelWork,
    PeakRates,
    StepWork,
    kv_token_bytes,
    pair_flops,
)
from trunkline_worker.step.plan import StepPlan


def model_work(
    spec: DecoderSpec, *, layer_bytes: int, head_bytes: int, expert_bytes: int, kv_itemsize: int
) -> ModelWork:
    """What the work of a model's steps depends on.

    layer_bytes, head_bytes, expert_bytes: of the weights as they are stored; layer_bytes: without experts
    """
    return ModelWork(
        layer_params=spec.token_params,
        head_params=spec.head_params,
        layer_bytes=layer_bytes,
        head_bytes=head_bytes,
        kv_token_bytes=spec.num_layers * kv_token_bytes(spec.num_kv_heads, spec.head_dim, kv_itemsize),
        pair_flops=spec.num_layers * pair_flops(spec.num_heads, spec.head_dim),
        windows=spec.windows,
        expert_bytes=expert_bytes,
        routing=spec.routing,
    )


class FloorOfStep(NamedTuple):
    """The least work of a step, and its least time; None: no peak rate is known."""

    work: StepWork
    least_s: float | None


class StepFloor:
    """Of the steps of one model on one device."""

    def __init__(self, work: ModelWork, rates: PeakRates) -> None:
        self._work = work
        self._rates = rates

    def of(self, plan: StepPlan, load: StepLoad) -> FloorOfStep:
        """The floor of a plan. Sums that its making left in `load` are enough, unless some layers have windows."""
        num_tokens = load.num_tokens - plan.num_padding
        if self._work.has_windows:
            attended = self._work.attended(plan.steps)
        else:
            attended = Attended(load.decode_kv_tokens + load.chunk_kv_tokens, load.decode_kv_tokens + load.causal_pairs)
        work = self._work.step(num_tokens, load.num_sampled + load.num_scored, attended)
        return FloorOfStep(work, self._rates.least_s(*work))
