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
    context_length: int | None = _setting(
        None, "most tokens of prompt and output together; default: the model's own", minimum=2
    )
    block_size: int = _setting(16, "tokens per KV block", minimum=1, maximum=256)
    kv_blocks: int | None = _setting(None, "blocks of the KV pool; default: found from free memory", minimum=1)
    kv_memory_fraction: float | None = _setting(
        None,
        "share of free memory for the KV pool, unless kv_blocks is given; default: 0.9 of a GPU's, 0.25 of a host's",
        minimum=0.01,
        maximum=0.95,
    )
    max_step_tokens: int = _setting(2048, "most tokens computed in one step", minimum=1)
    max_running_requests: int = _setting(256, "most choices that run at once", minimum=1)
    max_waiting_requests: int = _setting(1024, "most choices that wait; one more is refused", minimum=1)
    deterministic: bool = _setting(False, "a request's bits do not depend on what else runs")
    threads: int | None = _setting(None, "CPU threads of the engine; default: all cores", minimum=1)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "EngineSettings":
        return cls(**json.loads(text))
