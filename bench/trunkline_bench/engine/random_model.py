"""A randomly initialised Llama in Hugging Face layout, for speed measurements; its text is meaningless."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from trunkline_worker.model.config_json import parse_spec

RANDOM_22M = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def write_random_llama(directory: Path, config: dict[str, Any] = RANDOM_22M, seed: int = 0) -> None:
    """Writes config.json and model.safetensors; 22 M parameters with the default config."""
    spec = parse_spec(config)
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * 0.02

    weights = {
        "model.embed_tokens.weight": matrix(spec.vocab_size, spec.hidden_size),
        "model.norm.weight": torch.ones(spec.hidden_size),
    }
    for index, layer in enumerate(spec.layers):
        at = f"model.layers.{index}."
        for norm in (layer.attention.norm, layer.feed_forward.norm):
            weights[f"{at}{norm}.weight"] = torch.ones(spec.hidden_size)
        for product in layer.products:
            weights |= {f"{at}{name}.weight": matrix(rows, product.inner) for name, rows in product.tensors}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
