"""A randomly initialised Llama in Hugging Face layout, for speed measurements; its text is meaningless."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

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


def write_random_llama(directory: Path, config: dict[str, object] = RANDOM_22M, seed: int = 0) -> None:
    """Writes config.json and model.safetensors; 22 M parameters with the default config."""
    sizes = {name: value for name, value in config.items() if isinstance(value, int)}
    hidden, inter, head = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    queries, kv = sizes["num_attention_heads"] * head, sizes["num_key_value_heads"] * head
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * 0.02

    weights = {
        "model.embed_tokens.weight": matrix(sizes["vocab_size"], hidden),
        "model.norm.weight": torch.ones(hidden),
    }
    for layer in range(sizes["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        weights[prefix + "input_layernorm.weight"] = torch.ones(hidden)
        weights[prefix + "post_attention_layernorm.weight"] = torch.ones(hidden)
        weights[prefix + "self_attn.q_proj.weight"] = matrix(queries, hidden)
        weights[prefix + "self_attn.k_proj.weight"] = matrix(kv, hidden)
        weights[prefix + "self_attn.v_proj.weight"] = matrix(kv, hidden)
        weights[prefix + "self_attn.o_proj.weight"] = matrix(hidden, queries)
        weights[prefix + "mlp.gate_proj.weight"] = matrix(inter, hidden)
        weights[prefix + "mlp.up_proj.weight"] = matrix(inter, hidden)
        weights[prefix + "mlp.down_proj.weight"] = matrix(hidden, inter)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
