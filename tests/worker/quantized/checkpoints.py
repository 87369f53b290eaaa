"""Small random checkpoints that are stored quantised, and transformers' model of what they stand for."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.worker.model.oracle import base_config, parameter_of, published_tensors, their_model
from tests.worker.quantized.stored_formats import StoredFormat

SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"head_dim": 32}
PRODUCTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_checkpoint(
    directory: Path,
    form: StoredFormat,
    *,
    architecture: str = "Qwen3ForCausalLM",
    plain: tuple[str, ...] = (),
    others: dict[str, StoredFormat] | None = None,
    seed: int = 1,
    **changes: Any,
) -> Any:
    """Writes a checkpoint; returns the model of transformers that it stands for.

    plain: ends of the names of parts that are not quantised; others: formats of parts with other ends, which
    form.config must name; changes: of config.json
    """
    config = base_config(architecture) | SIZES | changes
    directory.mkdir(exist_ok=True)
    theirs = their_model(directory, config)
    draw = torch.Generator().manual_seed(seed)
    tensors = load_file(directory / "model.safetensors")
    with torch.no_grad():
        theirs.model.norm.weight *= 0.1  # so that logits are about 1, as those of real models
    tensors["model.norm.weight"] = theirs.model.norm.weight.detach().clone()
    for name in list(published_tensors(theirs)):
        part = name.removesuffix(".weight")
        if name == part or not part.endswith(PRODUCTS) or part.endswith(plain):
            continue
        own = next((other for end, other in (others or {}).items() if part.endswith(end)), form)
        parameter = parameter_of(theirs, part)
        rows, inner = parameter.shape
        stored = own.store(rows, inner, draw)
        del tensors[name]
        tensors = {f"{part}.{own_name}": tensor.contiguous() for own_name, tensor in stored.items()} | tensors
        with torch.no_grad():
            parameter.copy_(own.values(stored))
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": form.config}))
    return theirs


def change_tensors(directory: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
