"""Tiny random checkpoints of every architecture, written by transformers, which is also the truth for them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

VOCAB = 97

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}


@dataclass(frozen=True)
class Variant:
    family: str  # how transformers names its classes
    changes: dict[str, Any]


VARIANTS = {
    "llama2": Variant("Llama", {"num_key_value_heads": 6}),
    "llama2-gqa-tied": Variant("Llama", {"tie_word_embeddings": True}),
    "llama-biases": Variant("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3-scaled-rope": Variant("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear-rope": Variant("Llama", {"rope_parameters": LINEAR_ROPE}),
    "mistral-window": Variant("Mistral", {"sliding_window": 9, "head_dim": 16}),
    "mistral-no-window": Variant("Mistral", {"sliding_window": None}),
    "qwen2": Variant("Qwen2", {}),
    "qwen2-window": Variant("Qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": Variant("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-biases": Variant("Qwen3", {"head_dim": 16, "attention_bias": True}),
    "mixtral-window": Variant("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 9}),
    "olmoe": Variant("Olmoe", {"num_experts": 8, "num_experts_per_tok": 3, "pad_token_id": None}),
    "qwen2-moe": Variant("Qwen2Moe", EXPERTS | {"shared_expert_intermediate_size": 36}),
    "qwen3-moe": Variant("Qwen3Moe", EXPERTS | {"norm_topk_prob": True, "num_key_value_heads": 2}),
    "qwen3-moe-some-layers": Variant("Qwen3Moe", EXPERTS | {"decoder_sparse_step": 2, "mlp_only_layers": [0]}),
}


def write_checkpoint(name: str, directory: Path, **save: Any) -> Any:
    """Writes a checkpoint; returns the transformers model that it holds."""
    import transformers  # takes seconds, which processes that only collect tests are spared

    variant = VARIANTS[name]
    torch.manual_seed(sum(map(ord, name)))
    make, configure = (getattr(transformers, f"{variant.family}{kind}") for kind in ("ForCausalLM", "Config"))
    model = make(configure(**{**SIZES, **variant.changes})).float()
    model.train(False)
    with torch.no_grad():
        for parameter in model.parameters():
            # Far from the small initial values, so that every bias and norm shows in the logits.
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory, **save)
    return model
