"""What the least work of a loaded model's steps depends on, and the peak rates of its device."""

from trunkline_worker.engine.step_floor import StepFloor
from trunkline_worker.model.loading import LoadedModel
from trunkline_worker.settings import EngineSettings
from trunkline_worker.step.model_work import ModelWork, layer_params, pair_flops
from trunkline_worker.step.peak_rates import peak_rates


def step_floor(model: LoadedModel, settings: EngineSettings, gpu_name: str) -> StepFloor:
    """The floor of a model's steps.  gpu_name: as torch reports it; empty: no GPU"""
    dtype = str(model.dtype).removeprefix("torch.")
    rates = peak_rates(
        gpu_name,
        dtype=dtype,
        quantization=settings.quantization,
        tflops=settings.peak_tflops,
        gb_per_s=settings.peak_gb_per_s,
    )
    return StepFloor(model_work(model), rates)


def model_work(model: LoadedModel) -> ModelWork:
    """What the work of a loaded model's steps depends on."""
    spec = model.spec
    return ModelWork(
        layer_params=spec.num_layers
        * layer_params(
            hidden=spec.hidden_size,
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            intermediate=spec.intermediate_size,
        ),
        head_params=spec.hidden_size * spec.vocab_size,
        layer_bytes=model.weight_bytes.layers,
        head_bytes=model.weight_bytes.head,
        kv_token_bytes=model.kv_bytes_per_block(1),
        pair_flops=spec.num_layers * pair_flops(spec.num_heads, spec.head_dim),
        windows=spec.windows,
    )
