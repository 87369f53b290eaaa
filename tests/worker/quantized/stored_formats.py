"""Small random checkpoints in each quantised format, and transformers' model of the values that outside code finds."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.worker.model.oracle import base_config, silence, their_model

Stored = dict[str, Tensor]  # the tensors of a part, without its name
SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"head_dim": 32}
SCALE = 0.01  # of the values of weights, so that logits are about 1
PRODUCTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class StoredFormat:
    """store: draws the tensors of a part [rows, inner]; values: what they stand for, by code that is not ours"""

    config: dict[str, Any]
    store: Callable[[int, int, torch.Generator], Stored]
    values: Callable[[Stored], Tensor]


def write_checkpoint(
    directory: Path,
    form: StoredFormat,
    *,
    architecture: str = "Qwen3ForCausalLM",
    plain: tuple[str, ...] = (),
    seed: int = 1,
    **changes: Any,
) -> Any:
    """Writes a checkpoint; returns the model of transformers that it stands for.

    plain: ends of the names of parts that are not quantised; changes: of config.json
    """
    config = base_config(architecture) | SIZES | changes
    directory.mkdir(exist_ok=True)
    theirs = their_model(directory, config)
    draw = torch.Generator().manual_seed(seed)
    tensors = load_file(directory / "model.safetensors")
    for name, parameter in theirs.named_parameters():
        part = name.removesuffix(".weight")
        if not part.endswith(PRODUCTS) or part.endswith(plain or ("-",)) or name == part:
            continue
        rows, inner = parameter.shape
        stored = form.store(rows, inner, draw)
        del tensors[name]
        tensors |= {f"{part}.{own}": tensor for own, tensor in stored.items()}
        with torch.no_grad(), silence():
            parameter.copy_(form.values(stored))
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": form.config}))
    return theirs


def change_tensors(directory: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def random_scales(shape: tuple[int, ...], draw: torch.Generator, most: float) -> Tensor:
    """Scales with which values of at most `most` are of the size of weights."""
    return (torch.rand(shape, generator=draw) + 0.5) * (SCALE / most * 5)


def random_fp8(rows: int, inner: int, draw: torch.Generator) -> Tensor:
    bits = torch.randint(0, 256, (rows, inner), dtype=torch.uint8, generator=draw)
    return torch.where(bits & 127 == 127, 0, bits).view(torch.float8_e4m3fn)


def _by_transformers(stored: Stored) -> Tensor:
    from transformers.integrations import finegrained_fp8

    operation: Any = finegrained_fp8.Fp8Dequantize
    scale = next(tensor for name, tensor in stored.items() if name.startswith("weight_scale"))
    values: Tensor = operation(None).convert({"weight": stored["weight"], "weight_scale_inv": scale})["weight"]
    return values.float()


def fp8(shape: Callable[[int, int], tuple[int, ...]], scale_name: str, **config: Any) -> StoredFormat:
    def store(rows: int, inner: int, draw: torch.Generator) -> Stored:
        scale = random_scales(shape(rows, inner), draw, 448)
        return {"weight": random_fp8(rows, inner, draw), scale_name: scale, "input_scale": torch.tensor(0.5)}

    return StoredFormat({"quant_method": "fp8", "activation_scheme": "static", **config}, store, _by_transformers)


FORMATS: dict[str, StoredFormat] = {
    "fp8-blocks": fp8(lambda r, i: (r // 32, i // 64), "weight_scale_inv", weight_block_size=[32, 64], fmt="e4m3"),
    "fp8-tensor": fp8(lambda r, i: (), "weight_scale", ignored_layers=["lm_head"]),
    "fp8-tensor-inv": fp8(lambda r, i: (), "weight_scale_inv", weight_block_size=None),
    "fp8-channel": fp8(lambda r, i: (r, 1), "weight_scale"),
}
