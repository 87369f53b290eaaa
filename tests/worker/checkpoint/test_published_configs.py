"""Checkpoints that are out there: every key that their families carry is known."""

from typing import Any

import pytest

from trunkline_worker.model.config_json import parse_spec

LLAMA_KEYS = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "hidden_act": "silu",
    "initializer_range": 0.02, "mlp_bias": False, "pretraining_tp": 1, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0", "use_cache": True,
}  # fmt: skip
LLAMA31_ROPE = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip
QWEN_KEYS = {
    "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu",
    "initializer_range": 0.02, "max_window_layers": 28, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.43.1", "use_cache": True,
    "use_sliding_window": False, "vocab_size": 152064,
}  # fmt: skip
PHI_KEYS = {
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "embd_pdrop": 0.0, "hidden_act": "silu",
    "initializer_range": 0.02, "resid_pdrop": 0.0, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
    "transformers_version": "4.47.0", "use_cache": True,
}  # fmt: skip
OF_EXPERTS = {"output_router_logits": False, "router_aux_loss_coef": 0.001}


def sizes(hidden: int, inter: int, layers: int, heads: int, kv_heads: int, context: int, vocab: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "intermediate_size": inter, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "max_position_embeddings": context, "vocab_size": vocab,
    }  # fmt: skip


# The keys of published checkpoints, by the family that has them. → context length
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "llama-2-7b": (
        {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", **sizes(4096, 11008, 32, 32, 32, 4096, 32000),
            "_name_or_path": "meta-llama/Llama-2-7b-hf", "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
            "initializer_range": 0.02, "pretraining_tp": 1, "rms_norm_eps": 1e-5, "rope_scaling": None,
            "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.31.0.dev0",
            "use_cache": True,
        },
        4096,
    ),
    "llama-3.1-8b": (
        {
            **LLAMA_KEYS, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 500000.0,
            **sizes(4096, 14336, 32, 32, 8, 131072, 128256), "rope_scaling": LLAMA31_ROPE,
            "eos_token_id": [128001, 128008, 128009],
        },
        131072,
    ),
    "llama-3.2-1b-unsloth": (
        {
            **LLAMA_KEYS, "_name_or_path": "unsloth/Llama-3.2-1B", "architectures": ["LlamaForCausalLM"],
            "model_type": "llama", "rope_theta": 500000.0, "head_dim": 64,
            **sizes(2048, 8192, 16, 32, 8, 131072, 128256),
            "rope_scaling": {**LLAMA31_ROPE, "factor": 32.0}, "eos_token_id": 128001, "pad_token_id": 128004,
            "tie_word_embeddings": True, "unsloth_fixed": True, "unsloth_version": "2024.9",
        },
        131072,
    ),
    "tinyllama": (
        {
            **LLAMA_KEYS, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "eos_token_id": 2,
            "rope_scaling": None, "rope_theta": 10000.0, **sizes(2048, 5632, 22, 32, 4, 2048, 32000),
        },
        2048,
    ),
    "smollm2": (
        {
            **LLAMA_KEYS, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "eos_token_id": 2,
            "is_llama_config": True, "rope_interleaved": False, "rope_scaling": None, "rope_theta": 130000,
            "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}},
            **sizes(2048, 8192, 24, 32, 32, 8192, 49152),
            "tie_word_embeddings": True, "pad_token_id": 2,
        },
        8192,
    ),
    "yi-6b": (
        {
            **LLAMA_KEYS, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "eos_token_id": 2,
            "auto_map": {"AutoConfig": "configuration_yi.YiConfig"}, "rope_theta": 5000000.0,
            **sizes(4096, 11008, 32, 32, 4, 4096, 64000),
        },
        4096,
    ),
    "deepseek-coder": (
        {
            **LLAMA_KEYS, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "eos_token_id": 32021,
            "rope_scaling": {"factor": 4.0, "type": "linear"}, "rope_theta": 100000,
            **sizes(4096, 11008, 32, 32, 32, 16384, 32256),
        },
        16384,
    ),
    "yarn-llama-2": (
        {
            **LLAMA_KEYS, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "eos_token_id": 2,
            "auto_map": {"AutoModelForCausalLM": "modeling_llama_together_yarn.LlamaForCausalLM"},
            "rope_scaling": {
                "factor": 32.0, "finetuned": True, "original_max_position_embeddings": 4096, "type": "yarn",
            },
            **sizes(4096, 11008, 32, 32, 32, 131072, 32000),
        },
        131072,
    ),
    "mistral-7b": (
        {
            "architectures": ["MistralForCausalLM"], "model_type": "mistral",
            **sizes(4096, 14336, 32, 32, 8, 32768, 32000),
            "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "initializer_range": 0.02, "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "transformers_version": "4.34.0.dev0", "use_cache": True, "attention_dropout": 0.0,
        },
        32768,
    ),
    "qwen2.5-7b-with-yarn-as-its-readme-says": (
        {
            **QWEN_KEYS, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "sliding_window": 131072,
            **sizes(3584, 18944, 28, 28, 4, 32768, 152064),
            "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
        },
        131072,
    ),
    "deepseek-r1-distill-qwen-1.5b": (
        {
            **QWEN_KEYS, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "sliding_window": 4096,
            **sizes(1536, 8960, 28, 12, 2, 131072, 151936), "use_mrope": False, "bos_token_id": 151646,
            "eos_token_id": 151643, "rope_theta": 10000, "max_window_layers": 21,
        },
        131072,
    ),
    "qwen3-8b": (
        {
            **QWEN_KEYS, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False,
            "head_dim": 128, **sizes(4096, 12288, 36, 32, 8, 40960, 151936), "max_window_layers": 36,
            "rope_scaling": None,
            "sliding_window": None,
        },
        40960,
    ),
    "deepseek-r1-0528-qwen3-8b": (
        {
            **QWEN_KEYS, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False,
            "head_dim": 128, **sizes(4096, 12288, 36, 32, 8, 131072, 151936), "max_window_layers": 36,
            "rope_scaling": {
                "attn_factor": 0.8782488562869419, "factor": 4.0, "original_max_position_embeddings": 32768,
                "rope_type": "yarn",
            },
            "sliding_window": None,
        },
        131072,
    ),
    "qwen3-30b-a3b": (
        {
            **QWEN_KEYS, **OF_EXPERTS, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
            "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128, "mlp_only_layers": [],
            "moe_intermediate_size": 768, "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8,
            **sizes(2048, 6144, 48, 32, 4, 40960, 151936), "max_window_layers": 48, "rope_scaling": None,
            "sliding_window": None,
        },
        40960,
    ),
    "mixtral-8x7b-v0.1": (
        {
            **OF_EXPERTS, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "attention_dropout": 0.0,
            "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "initializer_range": 0.02,
            "num_experts_per_tok": 2, "num_local_experts": 8, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0,
            "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "transformers_version": "4.36.0.dev0", "use_cache": True, **sizes(4096, 14336, 32, 32, 8, 32768, 32000),
        },
        32768,
    ),
    "qwen3-coder-30b-a3b": (
        {
            **QWEN_KEYS, **OF_EXPERTS, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
            **sizes(2048, 5472, 48, 32, 4, 262144, 151936), "attention_bias": False, "decoder_sparse_step": 1,
            "head_dim": 128, "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True,
            "num_experts": 128, "num_experts_per_tok": 8, "qkv_bias": False, "rope_scaling": None,
            "rope_theta": 10000000, "shared_expert_intermediate_size": 0, "sliding_window": None,
        },
        262144,
    ),
    "qwen1.5-moe-a2.7b": (
        {
            **QWEN_KEYS, **OF_EXPERTS, "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe",
            **sizes(2048, 5632, 24, 16, 16, 8192, 151936), "decoder_sparse_step": 1, "max_window_layers": 21,
            "moe_intermediate_size": 1408, "norm_topk_prob": False, "num_experts": 60, "num_experts_per_tok": 4,
            "shared_expert_intermediate_size": 5632, "sliding_window": 32768,
        },
        8192,
    ),
    "olmoe-1b-7b-0924": (
        {
            **OF_EXPERTS, "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "attention_bias": False,
            "attention_dropout": 0.0, "clip_qkv": None, "eos_token_id": 50279, "hidden_act": "silu",
            "initializer_range": 0.02, "norm_topk_prob": False, "num_experts": 64, "num_experts_per_tok": 8,
            "pad_token_id": 1, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000.0,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.45.0.dev0",
            "use_cache": True, **sizes(2048, 1024, 16, 16, 16, 4096, 50304),
        },
        4096,
    ),
    "falcon3-7b": (
        {
            **LLAMA_KEYS, "activation": "swiglu", "architectures": ["LlamaForCausalLM"], "model_type": "llama",
            "head_dim": 256, "eos_token_id": 11, "rope_scaling": None, "rope_theta": 1000042,
            **sizes(3072, 23040, 28, 12, 4, 32768, 131072),
        },
        32768,
    ),
    "olmo-2-7b": (
        {
            "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "attention_bias": False,
            "attention_dropout": 0.0, "eos_token_id": 100257, "hidden_act": "silu", "initializer_range": 0.02,
            "pad_token_id": 100277, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 500000,
            "tie_word_embeddings": False, "torch_dtype": "float32", "transformers_version": "4.47.0.dev0",
            "use_cache": True, **sizes(4096, 11008, 32, 32, 32, 4096, 100352),
        },
        4096,
    ),
    "olmo-3-7b": (
        {
            "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "attention_bias": False,
            "attention_dropout": 0.0, "eos_token_id": 100257, "hidden_act": "silu", "initializer_range": 0.02,
            "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8, "pad_token_id": 100277,
            "rms_norm_eps": 1e-6, "rope_theta": 500000, "sliding_window": 4096, "tie_word_embeddings": False,
            "rope_scaling": {
                "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
                "original_max_position_embeddings": 8192, "rope_type": "yarn",
            },
            "torch_dtype": "bfloat16", "transformers_version": "4.57.0", "use_cache": False,
            **sizes(4096, 11008, 32, 32, 32, 65536, 100278),
        },
        65536,
    ),
    "exaone-4.0-32b": (
        {
            "architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4", "attention_dropout": 0.0,
            "bos_token_id": 1, "eos_token_id": 361, "head_dim": 128, "hidden_act": "silu", "initializer_range": 0.02,
            "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 16, "pad_token_id": 0,
            "rms_norm_eps": 1e-5, "rope_scaling": {**LLAMA31_ROPE, "factor": 16.0}, "rope_theta": 1000000,
            "sliding_window": 4096, "sliding_window_pattern": "LLLG", "tie_word_embeddings": False,
            "torch_dtype": "bfloat16", "transformers_version": "4.54.0.dev0", "use_cache": True,
            **sizes(5120, 27392, 64, 40, 8, 131072, 102400),
        },
        131072,
    ),
    "seed-oss-36b": (
        {
            "architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss", "attention_bias": True,
            "attention_dropout": 0.1, "attention_out_bias": False, "bos_token_id": 0, "eos_token_id": 2,
            "head_dim": 128, "hidden_act": "silu", "initializer_range": 0.02, "mlp_bias": False, "pad_token_id": 1,
            "residual_dropout": 0.1, "rms_norm_eps": 1e-6, "rope_scaling": {"rope_type": "default"},
            "rope_theta": 10000000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "transformers_version": "4.55.0", "use_cache": True, **sizes(5120, 27648, 64, 80, 8, 524288, 155136),
        },
        524288,
    ),
    "phi-3-mini-128k": (
        {
            **PHI_KEYS, **sizes(3072, 8192, 32, 32, 32, 131072, 32064), "bos_token_id": 1, "eos_token_id": 32000,
            "original_max_position_embeddings": 4096, "pad_token_id": 32000, "rope_theta": 10000.0,
            "rope_scaling": {"long_factor": [1.5] * 48, "short_factor": [1.1] * 48, "type": "longrope"},
            "sliding_window": 262144, "tie_word_embeddings": False,
        },
        4096,
    ),
    "phi-4": (
        {
            **PHI_KEYS, **sizes(5120, 17920, 40, 40, 10, 16384, 100352), "bos_token_id": 100257, "eos_token_id": 100265,
            "original_max_position_embeddings": 16384, "pad_token_id": 100349, "rope_scaling": None,
            "rope_theta": 250000, "sliding_window": None, "tie_word_embeddings": False,
        },
        16384,
    ),
    "phi-4-mini": (
        {
            **PHI_KEYS, **sizes(3072, 8192, 32, 24, 8, 131072, 200064), "bos_token_id": 199999, "eos_token_id": 199999,
            "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False,
            "original_max_position_embeddings": 4096, "pad_token_id": 199999, "partial_rotary_factor": 0.75,
            "rope_scaling": {"long_factor": [1.5] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
            "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": True,
        },
        4096,
    ),
    "smollm3-3b": (
        {
            **LLAMA_KEYS, "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "bos_token_id": 128000,
            "eos_token_id": 128012, "layer_types": ["full_attention"] * 36, "max_window_layers": 28,
            "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "pad_token_id": 128004,
            "pretraining_tp": 2, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 5000000.0,
            "sliding_window": None, "tie_word_embeddings": True, "use_cache": False, "use_sliding_window": False,
            **sizes(2048, 11008, 36, 16, 4, 65536, 128256),
        },
        65536,
    ),
    "granite-3.3-8b": (
        {
            "architectures": ["GraniteForCausalLM"], "model_type": "granite", "attention_bias": False,
            "attention_dropout": 0.0, "attention_multiplier": 0.0078125, "bos_token_id": 0,
            "embedding_multiplier": 12.0, "eos_token_id": 0, "hidden_act": "silu", "initializer_range": 0.02,
            "logits_scaling": 16.0, "mlp_bias": False, "pad_token_id": 0, "residual_multiplier": 0.22,
            "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000000.0, "tie_word_embeddings": True,
            "torch_dtype": "bfloat16", "transformers_version": "4.49.0", "use_cache": True,
            **sizes(4096, 12800, 40, 32, 8, 131072, 49159),
        },
        131072,
    ),
    "qwen3-as-transformers-5-writes-it": (
        {
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False,
            "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "pad_token_id": None,
            "dtype": "bfloat16", "head_dim": 128,
            **sizes(4096, 12288, 36, 32, 8, 40960, 151936), "hidden_act": "silu", "initializer_range": 0.02,
            "layer_types": ["full_attention"] * 36, "max_window_layers": 36, "rms_norm_eps": 1e-6, "use_cache": True,
            "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "sliding_window": None,
            "tie_word_embeddings": False, "transformers_version": "5.0.0", "use_sliding_window": False,
        },
        40960,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_checkpoints_have_no_key_that_is_refused(name: str) -> None:
    config, context = PUBLISHED[name]
    assert parse_spec(config).context_length == context
