"""Olmo2ForCausalLM: norms after attention and feed-forward part, and norms of all queries and of all keys."""

from collections.abc import Iterator

from trunkline_worker.model.architectures.architecture import (
    Architecture,
    LayerSizes,
    gated_mlp,
    layer_windows,
    read_head_dim,
    read_kv_heads,
    self_attention,
)
from trunkline_worker.model.architectures.config_keys import NONE, OFF, ConfigKeys
from trunkline_worker.model.architectures.decoder_spec import LayerSpec
from trunkline_worker.model.checkpoint.entries import Entries


def layer(config: Entries, sizes: LayerSizes, window: int | None) -> LayerSpec:
    bias = config.flag("attention_bias", False)
    attention = self_attention(
        sizes, norm=None, post_norm="post_attention_layernorm", qkv_bias=bias, output_bias=bias, qk_norm="all heads",
        window=window,
    )  # fmt: skip
    return LayerSpec(attention, gated_mlp(sizes, norm=None, post_norm="post_feedforward_layernorm"))


def _layers(config: Entries, sizes: LayerSizes) -> Iterator[LayerSpec]:
    for window in layer_windows(config, sizes.num_layers, None):
        yield layer(config, sizes, window)


OLMO2 = Architecture(
    name="Olmo2ForCausalLM",
    model_type="olmo2",
    keys=ConfigKeys(
        read={"attention_bias"},
        without_effect={"max_window_layers"},  # no layer has a window
        neutral={"mlp_bias": OFF, "sliding_window": NONE, "use_sliding_window": OFF, "use_qk_norm": (None, True)},
    ),
    head_dim=lambda config, hidden, num_heads: read_head_dim(config, hidden // num_heads),
    num_kv_heads=lambda config, num_heads: read_kv_heads(config, num_heads, num_heads),
    layers=_layers,
)
