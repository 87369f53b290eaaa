"""Settings of the engine process. The front parses them, together with its own, and passes them on as JSON."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any


def _setting(default: Any, help: str, **limits: Any) -> Any:
    """A field with the metadata that trunkline_runtime.settings reads; the engine itself must not import that."""
    return field(default=default, metadata={"help": help, **limits})


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How a worker computes."""

    model: str = field(
        metadata={"help": "directory of the model in Hugging Face layout, or a GGUF file", "metavar": "PATH"}
    )
    task: str = _setting(
        "auto",
        "what the model is served for; auto: what the checkpoint is made for. embed: vectors, of the last token if the "
        "checkpoint does not say it; score: rankings, by the answers yes and no if it is made to generate",
        choices=("auto", "generate", "embed", "score"),
    )
    any_dimensions: bool = _setting(
        False, "requests may cut vectors to any length, as models of Matryoshka embeddings allow"
    )
    dtype: str = _setting(
        "auto", "of weights and KV; auto: the checkpoint's", choices=("auto", "float32", "bfloat16", "float16")
    )
    load_format: str = _setting(
        "auto", "auto: safetensors or GGUF; dummy: random weights from config.json alone", choices=("auto", "dummy")
    )
    device: str = _setting("auto", "auto: cuda where there is a GPU, else cpu", choices=("auto", "cpu", "cuda"))
    ignore_config_keys: tuple[str, ...] = _setting(
        (),
        "keys of config.json to ignore, separated by commas: unknown keys that are known to be harmless",
        metavar="KEY,...",
    )
    kernels: str = _setting(
        "auto",
        "triton, or torch (plain, slower, for any device); auto: triton on a GPU, C on a CPU",
        choices=("auto", "triton", "torch"),
    )
    quantization: str = _setting(
        "none",
        "of the layers' weights while loading: int8, int4 (weights only), fp8 (activations too; on a GPU)",
        choices=("none", "int8", "int4", "fp8"),
    )
    graphs: str = _setting(
        "auto",
        "auto: small steps on a GPU are captured graphs; off: kernels are launched one by one",
        choices=("auto", "off"),
    )
    kv_dtype: str = _setting(
        "auto", "of the KV pool; auto: the model's; fp8: half the memory and reads, on a GPU", choices=("auto", "fp8")
    )
    context_length: int | None = _setting(
        None, "most tokens of prompt and output together; default: the model's own", minimum=2, maximum=1 << 24
    )
    block_size: int = _setting(16, "tokens per KV block", minimum=1, maximum=256)
    kv_blocks: int | None = _setting(
        None, "blocks of the KV pool; default: derived from free memory", minimum=1, maximum=(1 << 31) - 2
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
        "choices that may wait in a lane and those above it; beyond it, only those of tenants below their share",
        minimum=1,
        maximum=1 << 24,
    )
    max_waiting_tokens: int = _setting(1 << 22, "tokens that may wait, counted likewise", minimum=1, maximum=1 << 40)
    itl_target_ms: float | None = _setting(
        None,
        "target time of a step: chunks of prompts are cut so that it takes no longer. Requests that have waited five "
        "times this may slow running streams down to half the pace. 0: no target; default: 100, and 500 for models "
        "that embed or score",
        minimum=0.0,
        maximum=60_000.0,
    )
    interactive_reserve: float = _setting(
        0.0,
        "share of a step's tokens, of the running set and of the KV pool that only the interactive lane may use; for "
        "fleets whose tenants file grants that lane",
        minimum=0.0,
        maximum=0.9,
    )
    aging_s: float = _setting(
        60.0,
        "if a lower lane has waiting choices and none was admitted for this time, its next choice goes first",
        minimum=0.001,
        maximum=1e6,
    )
    admission: str = _setting(
        "predicted",
        "predicted: a choice may run if the most KV that the running set will need is forecast to fit; optimistic: if "
        "its prompt fits now",
        choices=("predicted", "optimistic"),
    )
    batching: str = _setting(
        "continuous",
        "continuous, or a baseline for measurements: static (padded), static-unpadded, dynamic",
        choices=("continuous", "static", "static-unpadded", "dynamic"),
    )
    batch_size: int = _setting(64, "choices in a batch, with static and dynamic batching", minimum=1, maximum=1 << 16)
    batch_window_ms: float = _setting(
        100.0, "how long a batch waits to fill, with dynamic batching", minimum=0.0, maximum=3.6e6
    )
    step_timeout_s: float = _setting(
        120.0,
        "a step that takes longer ends the engine, for the worker to be restarted; 0: no limit",
        minimum=0.0,
        maximum=86400.0,
    )
    run_ahead: int | None = _setting(
        None, "steps that are scheduled before the step in flight is done; default: 1 on a GPU, 0 on a CPU", minimum=0,
        maximum=1,
    )  # fmt: skip
    price_per_hour: float = _setting(
        0.0, "what this worker costs per hour, for the cost of output tokens; 0: unknown", minimum=0.0, maximum=1e9
    )
    peak_tflops: float | None = _setting(
        None,
        "most TFLOP/s of the device in the model's dtype, for the share of the roofline in metrics; default: a known "
        "GPU's data sheet",
        minimum=1e-6,
        maximum=1e6,
        metavar="TFLOP/S",
    )
    peak_gb_per_s: float | None = _setting(
        None,
        "most GB/s of the device's memory, likewise; default: a known GPU's data sheet",
        minimum=1e-6,
        maximum=1e6,
        metavar="GB/S",
    )
    deterministic: bool = _setting(False, "a request's output does not depend on other requests, bit for bit")
    threads: int | None = _setting(None, "CPU threads of the engine; default: all cores", minimum=1, maximum=4096)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "EngineSettings":
        values: dict[str, Any] = json.loads(text)
        values["ignore_config_keys"] = tuple(values.get("ignore_config_keys", ()))  # JSON has no tuples
        return cls(**values)
