"""Qwen2MoeForCausalLM: a mixture of experts with a shared one in some or all layers; no layer has a window."""

from collections.abc import Iterator
from dataclasses import replace

from trunkline_worker.model.architectures.architecture import (
    MOST_HEADS,
    MOST_INTERMEDIATE,
    Architecture,
    LayerSizes,
    gated_experts,
    gated_mlp,
    layer_windows,
    read_head_dim,
    read_rule,
    self_attention,
)
from trunkline_worker.model.architectures.config_keys import (
    INTEGER_OR_NULL,
    OF_TRAINING_EXPERTS,
    OFF,
    ConfigKeys,
    Kind,
)
from trunkline_worker.model.architectures.decoder_spec import LayerSpec, LinearSpec
from trunkline_worker.model.architectures.qwen3_moe import QWEN_EXPERTS_KEYS, dense_layers
from trunkline_worker.model.checkpoint.entries import Entries

DEFAULT_KV_HEADS = 16


def _layers(config: Entries, sizes: LayerSizes) -> Iterator[LayerSpec]:
    bias = config.flag("qkv_bias", True)
    rule = read_rule(config, "num_experts", renormalized=config.flag("norm_topk_prob", False))
    own, of_shared = (
        config.integer(key, 1, MOST_INTERMEDIATE)
        for key in ("moe_intermediate_size", "shared_expert_intermediate_size")
    )
    experts = replace(
        gated_experts(sizes, rule, intermediate=own),
        shared=gated_mlp(sizes, norm=None, at="mlp.shared_expert", intermediate=of_shared),
        shared_gate=LinearSpec((("mlp.shared_expert_gate", 1),), sizes.hidden, False, "out"),
    )
    dense = dense_layers(config, sizes.num_layers)
    for layer, window in enumerate(layer_windows(config, sizes.num_layers, None)):
        attention = self_attention(sizes, qkv_bias=bias, window=window)
        yield LayerSpec(attention, gated_mlp(sizes) if layer in dense else experts)


QWEN2_MOE = Architecture(
    name="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    keys=ConfigKeys(
        read={"qkv_bias", "shared_expert_intermediate_size", *QWEN_EXPERTS_KEYS},
        without_effect={"max_window_layers", "sliding_window"} | OF_TRAINING_EXPERTS.keys(),
        kinds={
            "sliding_window": INTEGER_OR_NULL,
            "max_window_layers": Kind((int,), "an integer"),
            "use_sliding_window": Kind((bool,), "true or false"),
            **OF_TRAINING_EXPERTS,
        },
        neutral={"mlp_bias": OFF, "use_sliding_window": OFF},
    ),
    head_dim=lambda config, hidden, num_heads: read_head_dim(config, hidden // num_heads),
    num_kv_heads=lambda config, _: config.integer("num_key_value_heads", 1, MOST_HEADS, default=DEFAULT_KV_HEADS),
    layers=_layers,
)
