"""Settings of the engine process. Parsed by the front (which adds its own) and handed over as JSON."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any


def _setting(default: Any, help: str, **limits: Any) -> Any:
    """A field with the metadata that trunkline_runtime.settings reads; the engine itself must not import that."""
    return field(default=default, metadata={"help": help, **limits})


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What decides how a worker computes."""

    model: str = field(metadata={"help": "directory of the model in Hugging Face layout"})
    dtype: str = _setting(
        "auto", "weights and KV; auto: the checkpoint's", choices=("auto", "float32", "bfloat16", "float16")
    )
    load_format: str = _setting(
        "auto", "auto: safetensors; dummy: random weights from config.json alone", choices=("auto", "dummy")
    )
    device: str = _setting("auto", "auto: cuda where there is a GPU, else cpu", choices=("auto", "cpu", "cuda"))
    ignore_config_keys: tuple[str, ...] = _setting(
        (), "keys of config.json that are taken for absent, with commas: unknown ones that are known to be harmless"
    )
    allow_non_finite_weights: bool = _setting(False, "serve weights although some are NaN or infinite")
    kernels: str = _setting(
        "auto",
        "triton, or torch (plain, slower, for any device); auto: triton on a GPU, C on a CPU",
        choices=("auto", "triton", "torch"),
    )
    quantization: str = _setting(
        "none",
        "of the layers' weights, made while loading: int8, int4 (weights alone), fp8 (activations too); on a GPU",
        choices=("none", "int8", "int4", "fp8"),
    )
    graphs: str = _setting(
        "auto",
        "auto: steps of a GPU are captured graphs where they are small; off: their kernels are launched one by one",
        choices=("auto", "off"),
    )
    kv_dtype: str = _setting(
        "auto", "of the KV pool; auto: the model's; fp8: half the memory and reading, on a GPU", choices=("auto", "fp8")
    )
    context_length: int | None = _setting(
        None, "most tokens of prompt and output together; default: the model's own", minimum=2, maximum=1 << 24
    )
    block_size: int = _setting(16, "tokens per KV block", minimum=1, maximum=256)
    kv_blocks: int | None = _setting(
        None, "blocks of the KV pool; default: found from free memory", minimum=1, maximum=(1 << 31) - 2
    )
    kv_memory_fraction: float | None = _setting(
        None,
        "share of free memory for the KV pool, unless kv_blocks is given; default: 0.9 of a GPU's, 0.25 of a host's",
        minimum=0.01,
        maximum=0.95,
    )
    gpu_memory_share: float = _setting(
        1.0,
        "part of the GPU's memory for this worker, weights included; below 1 where several workers share the GPU",
        minimum=0.01,
        maximum=1.0,
    )
    max_step_tokens: int = _setting(2048, "most tokens computed in one step", minimum=1, maximum=1 << 20)
    max_running_requests: int = _setting(
        256, "most choices that run at once; never more than max_step_tokens", minimum=1, maximum=1 << 16
    )
    max_waiting_requests: int = _setting(
        1024,
        "choices that may wait in a lane and those above it; past it only tenants with less than their share of it",
        minimum=1,
        maximum=1 << 24,
    )
    max_waiting_tokens: int = _setting(1 << 22, "most tokens that wait, counted likewise", minimum=1, maximum=1 << 40)
    long_prefill_threshold: int = _setting(
        0, "most tokens of one prompt in a step in which others want some; 0: no limit", minimum=0, maximum=1 << 20
    )
    itl_target_ms: float = _setting(
        100.0,
        "chunks of prompts shrink so that a step takes no longer; who waits does so for five times this before running "
        "streams may be slowed down to half the pace; 0: no target",
        minimum=0.0,
        maximum=60_000.0,
    )
    interactive_reserve: float = _setting(
        0.0,
        "share of a step's tokens, of the running set and of the KV pool that only the interactive lane may use: for "
        "fleets whose tenants file grants that lane",
        minimum=0.0,
        maximum=0.9,
    )
    aging_s: float = _setting(
        60.0,
        "a lower lane from which nobody was admitted for this time has its next choice go first",
        minimum=0.001,
        maximum=1e6,
    )
    admission: str = _setting(
        "predicted",
        "predicted: a choice may run when the KV that the running set will need at most is foreseen to fit; "
        "optimistic: when its prompt fits now",
        choices=("predicted", "optimistic"),
    )
    batching: str = _setting(
        "continuous",
        "continuous; or, to measure against: static (padded), static-unpadded, dynamic",
        choices=("continuous", "static", "static-unpadded", "dynamic"),
    )
    batch_size: int = _setting(64, "of static and dynamic batching", minimum=1, maximum=1 << 16)
    batch_window_ms: float = _setting(
        100.0, "of dynamic batching: how long a batch waits to fill", minimum=0.0, maximum=3.6e6
    )
    step_timeout_s: float = _setting(
        120.0, "a step that takes longer ends the engine, to be started again; 0: never", minimum=0.0, maximum=86400.0
    )
    run_ahead: int | None = _setting(
        None, "steps that are planned before the one under way is done; default: 1 on a GPU, 0 on a CPU", minimum=0,
        maximum=1,
    )  # fmt: skip
    price_per_hour: float = _setting(
        0.0, "what this worker costs per hour, for the cost of output tokens; 0: unknown", minimum=0.0, maximum=1e9
    )
    deterministic: bool = _setting(False, "a request's bits do not depend on what else runs")
    threads: int | None = _setting(None, "CPU threads of the engine; default: all cores", minimum=1, maximum=4096)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "EngineSettings":
        values: dict[str, Any] = json.loads(text)
        values["ignore_config_keys"] = tuple(values.get("ignore_config_keys", ()))  # JSON has no tuples
        return cls(**values)
