"""OlmoeForCausalLM: a mixture of experts in every layer, and norms of all queries and of all keys."""

from collections.abc import Iterator

from trunkline_worker.model.architectures.architecture import (
    EXPERTS_KEYS,
    Architecture,
    LayerSizes,
    gated_experts,
    read_head_dim,
    read_kv_heads,
    read_rule,
    same_window,
    self_attention,
)
from trunkline_worker.model.architectures.config_keys import NONE, OF_TRAINING_EXPERTS, OFF, ConfigKeys
from trunkline_worker.model.architectures.decoder_spec import LayerSpec
from trunkline_worker.model.checkpoint.entries import Entries
from trunkline_worker.model.checkpoint.refusals import ModelError


def _head_dim(config: Entries, hidden: int, num_heads: int) -> int:
    """Raises ModelError unless the queries of all heads are as wide as a hidden state: the norm of queries is."""
    if hidden % num_heads:
        raise ModelError(f"hidden_size {hidden} is not a multiple of num_attention_heads {num_heads}")
    head_dim = read_head_dim(config, hidden // num_heads)
    if head_dim * num_heads != hidden:
        raise ModelError(f"head_dim {head_dim} is not hidden_size {hidden} over num_attention_heads {num_heads}")
    return head_dim


def _layers(config: Entries, sizes: LayerSizes) -> Iterator[LayerSpec]:
    bias = config.flag("attention_bias", False)
    rule = read_rule(config, "num_experts", renormalized=config.flag("norm_topk_prob", False))
    attention = self_attention(
        sizes, qkv_bias=bias, output_bias=bias, qk_norm="all heads", window=same_window(config, None)
    )
    experts = gated_experts(sizes, rule, intermediate=sizes.intermediate)
    for _ in range(sizes.num_layers):
        yield LayerSpec(attention, experts)


OLMOE = Architecture(
    name="OlmoeForCausalLM",
    model_type="olmoe",
    keys=ConfigKeys(
        read={"attention_bias", "norm_topk_prob", "num_experts_per_tok", *EXPERTS_KEYS},
        without_effect={"max_window_layers"} | OF_TRAINING_EXPERTS.keys(),
        kinds=OF_TRAINING_EXPERTS,
        neutral={"mlp_bias": OFF, "sliding_window": NONE, "use_sliding_window": OFF, "use_qk_norm": (None, True)},
    ),
    head_dim=_head_dim,
    num_kv_heads=lambda config, num_heads: read_kv_heads(config, num_heads, num_heads),
    layers=_layers,
)
