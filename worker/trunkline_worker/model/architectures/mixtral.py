"""MixtralForCausalLM: a mixture of experts in every layer; all layers have a window, or none has."""

from collections.abc import Iterator

from trunkline_worker.model.architectures.architecture import (
    EXPERTS_KEYS,
    MOST_HEADS,
    Architecture,
    LayerSizes,
    gated_experts,
    read_head_dim,
    read_rule,
    read_window,
    same_window,
    self_attention,
)
from trunkline_worker.model.architectures.config_keys import INTEGER_OR_NULL, OF_TRAINING_EXPERTS, OFF, ConfigKeys, Kind
from trunkline_worker.model.architectures.decoder_spec import LayerSpec
from trunkline_worker.model.checkpoint.entries import Entries
from trunkline_worker.model.checkpoint.refusals import ModelError

DEFAULT_KV_HEADS = 8


def _check_theta(config: Entries) -> None:
    """Raises ModelError if the base of rotary embedding is left to transformers, whose default here is not the usual
    one."""
    objects = [config.values, *(config.values.get(key) for key in ("rope_parameters", "rope_scaling"))]
    if not any(isinstance(each, dict) and "rope_theta" in each for each in objects):
        raise ModelError("rope_theta is missing")


def _layers(config: Entries, sizes: LayerSizes) -> Iterator[LayerSpec]:
    _check_theta(config)
    window = read_window(config) if config.has("sliding_window") else None
    attention = self_attention(sizes, window=same_window(config, window))
    experts = gated_experts(
        sizes, read_rule(config, "num_local_experts", renormalized=True), intermediate=sizes.intermediate,
        at="block_sparse_moe", parts=("w1", "w3", "w2"),
    )  # fmt: skip
    for _ in range(sizes.num_layers):
        yield LayerSpec(attention, experts)


MIXTRAL = Architecture(
    name="MixtralForCausalLM",
    model_type="mixtral",
    keys=ConfigKeys(
        read={"sliding_window", "num_experts_per_tok", *EXPERTS_KEYS},
        without_effect={"max_window_layers", "router_jitter_noise"} | OF_TRAINING_EXPERTS.keys(),
        kinds={
            "sliding_window": INTEGER_OR_NULL,
            "router_jitter_noise": Kind((float,), "a number in [0, 1] with a decimal point"),
            **OF_TRAINING_EXPERTS,
        },
        neutral={"attention_bias": OFF, "mlp_bias": OFF, "use_sliding_window": OFF},
    ),
    head_dim=lambda config, hidden, num_heads: read_head_dim(config, hidden // num_heads, null_is_absent=True),
    num_kv_heads=lambda config, _: config.integer("num_key_value_heads", 1, MOST_HEADS, default=DEFAULT_KV_HEADS),
    layers=_layers,
)
