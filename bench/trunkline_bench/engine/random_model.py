"""Randomly initialised models in Hugging Face layout, for speed measurements; their text is meaningless."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from trunkline_worker.model.architectures.decoder_spec import ExpertsSpec
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
# 224 M parameters, of which a token uses 31 M beside embedding and head.
RANDOM_EXPERTS = RANDOM_22M | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 512,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "torch_dtype": "bfloat16",
}


def write_random_model(directory: Path, config: dict[str, Any] = RANDOM_22M, seed: int = 0) -> None:
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
        attention, fed = layer.attention, layer.feed_forward
        for norms, size in (
            ((attention.norm, fed.norm), spec.hidden_size),
            ((attention.query_norm, attention.key_norm), spec.head_dim),
        ):
            weights |= {f"{at}{norm}.weight": torch.ones(size) for norm in norms if norm is not None}
        for product in (*layer.products, *([fed.router] if isinstance(fed, ExpertsSpec) else [])):
            weights |= {f"{at}{name}.weight": matrix(rows, product.inner) for name, rows in product.tensors}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    dtype = getattr(torch, config["torch_dtype"])
    weights = {name: weight.to(dtype) for name, weight in weights.items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
