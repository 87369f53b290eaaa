"""Exaone4ForCausalLM: norms after attention and feed-forward part; beside layers with a window, others have no RoPE."""

from collections.abc import Iterator
from dataclasses import replace
from types import NoneType

from trunkline_worker.model.architectures.architecture import (
    MOST_HEADS,
    Architecture,
    LayerSizes,
    gated_mlp,
    layer_windows,
    read_head_dim,
    read_window,
    self_attention,
)
from trunkline_worker.model.architectures.config_keys import INTEGER_OR_NULL, OFF, ConfigKeys, Kind
from trunkline_worker.model.architectures.decoder_spec import LayerSpec
from trunkline_worker.model.checkpoint.entries import Entries
from trunkline_worker.model.checkpoint.refusals import ModelError

DEFAULT_KV_HEADS = 32


def _layers(config: Entries, sizes: LayerSizes) -> Iterator[LayerSpec]:
    # Without it, transformers needs a sliding_window_pattern that is a number, and published files have a string.
    if not config.has("layer_types"):
        raise ModelError("layer_types is missing")
    model_window = read_window(config)
    for window in layer_windows(config, sizes.num_layers, model_window):
        attention = self_attention(
            sizes, norm=None, post_norm="post_attention_layernorm", qk_norm="head", window=window
        )
        if window != model_window:
            attention = replace(attention, rope=None)
        yield LayerSpec(attention, gated_mlp(sizes, norm=None, post_norm="post_feedforward_layernorm"))


EXAONE4 = Architecture(
    name="Exaone4ForCausalLM",
    model_type="exaone4",
    keys=ConfigKeys(
        read={"sliding_window"},
        without_effect={"sliding_window_pattern"},  # layer_types says it
        kinds={
            "sliding_window": INTEGER_OR_NULL,
            "sliding_window_pattern": Kind((str, int, NoneType), "a string, an integer or null"),
        },
        neutral={"attention_bias": OFF, "mlp_bias": OFF, "use_qk_norm": (None, True)},
    ),
    head_dim=lambda config, hidden, num_heads: read_head_dim(config, hidden // num_heads),
    num_kv_heads=lambda config, _: config.integer("num_key_value_heads", 1, MOST_HEADS, default=DEFAULT_KV_HEADS),
    layers=_layers,
)
