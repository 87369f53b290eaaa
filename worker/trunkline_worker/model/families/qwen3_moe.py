"""Qwen3MoeForCausalLM: Qwen3 with a mixture of experts in some or all layers; all layers have a window, or none has."""

from collections.abc import Iterator

from trunkline_worker.model.architectures.architecture import (
    EXPERTS_KEYS,
    MOST_HEADS,
    MOST_INTERMEDIATE,
    Architecture,
    LayerSizes,
    gated_experts,
    gated_mlp,
    read_head_dim,
    read_rule,
    read_window,
    same_window,
    self_attention,
)
from trunkline_worker.model.architectures.config_keys import INTEGER_OR_NULL, OF_TRAINING_EXPERTS, OFF, ConfigKeys
from trunkline_worker.model.architectures.decoder_spec import LayerSpec
from trunkline_worker.model.checkpoint.entries import Entries

DEFAULT_KV_HEADS = 4
QWEN_EXPERTS_KEYS = {"norm_topk_prob", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step"}
QWEN_EXPERTS_KEYS |= {"mlp_only_layers", *EXPERTS_KEYS}


def dense_layers(config: Entries, num_layers: int) -> set[int]:
    """Returns the layers that have a plain feed-forward part."""
    step = config.integer("decoder_sparse_step", 1, num_layers, default=1)
    named = config.values.get("mlp_only_layers", [])
    if named is not None and not (isinstance(named, list) and all(type(layer) is int for layer in named)):
        raise config.refused("mlp_only_layers", named, "a list of numbers of layers, or null")
    return {*(named or ()), *(layer for layer in range(num_layers) if (layer + 1) % step)}


def _layers(config: Entries, sizes: LayerSizes) -> Iterator[LayerSpec]:
    bias = config.flag("attention_bias", False)
    window = same_window(config, read_window(config) if config.flag("use_sliding_window", False) else None)
    rule = read_rule(config, "num_experts", renormalized=config.flag("norm_topk_prob", False))
    intermediate = config.integer("moe_intermediate_size", 1, MOST_INTERMEDIATE)
    attention = self_attention(sizes, qkv_bias=bias, output_bias=bias, qk_norm="head", window=window)
    dense, experts = gated_mlp(sizes), gated_experts(sizes, rule, intermediate=intermediate)
    without_experts = dense_layers(config, sizes.num_layers)
    for layer in range(sizes.num_layers):
        yield LayerSpec(attention, dense if layer in without_experts else experts)


QWEN3_MOE = Architecture(
    name="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    keys=ConfigKeys(
        read={"sliding_window", "use_sliding_window", "attention_bias", *QWEN_EXPERTS_KEYS},
        without_effect={"max_window_layers"} | OF_TRAINING_EXPERTS.keys(),
        kinds={"sliding_window": INTEGER_OR_NULL, **OF_TRAINING_EXPERTS},
        neutral={
            "mlp_bias": OFF,
            "use_qk_norm": (None, True),
            # Qwen3-Coder's file has these keys of Qwen2-MoE, which transformers does not read here.
            "qkv_bias": OFF,
            "shared_expert_intermediate_size": (None, 0),
        },
    ),
    head_dim=lambda config, hidden, num_heads: read_head_dim(config, hidden // num_heads),
    num_kv_heads=lambda config, _: config.integer("num_key_value_heads", 1, MOST_HEADS, default=DEFAULT_KV_HEADS),
    layers=_layers,
)
