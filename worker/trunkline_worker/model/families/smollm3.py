"""SmolLM3ForCausalLM: some layers, by default every fourth one, have no rotary embedding, and may have a window."""

from collections.abc import Iterator
from dataclasses import replace

from trunkline_worker.model.architectures.architecture import (
    MOST_LAYERS,
    Architecture,
    LayerSizes,
    gated_mlp,
    layer_windows,
    read_head_dim,
    read_kv_heads,
    read_window,
    self_attention,
)
from trunkline_worker.model.architectures.config_keys import ConfigKeys, Kind
from trunkline_worker.model.architectures.decoder_spec import LayerSpec
from trunkline_worker.model.architectures.rope_scaling import RopeRules
from trunkline_worker.model.checkpoint.entries import Entries
from trunkline_worker.model.families.qwen2 import WINDOW_KINDS

DEFAULT_THETA = 2_000_000.0
DEFAULT_KV_HEADS = 4
DEFAULT_INTERVAL = 4


def _have_rope(config: Entries, num_layers: int) -> list[bool]:
    """Returns whether each layer has rotary embedding."""
    if not config.has("no_rope_layers"):
        interval = config.integer("no_rope_layer_interval", 1, MOST_LAYERS, default=DEFAULT_INTERVAL)
        return [layer % interval != 0 for layer in range(1, num_layers + 1)]
    marks = config.values["no_rope_layers"]
    if not isinstance(marks, list) or len(marks) < num_layers or any(type(mark) is not int for mark in marks):
        allowed = f"a list of {num_layers} or more, as num_hidden_layers says, of 1 (a layer with RoPE) and 0"
        raise config.refused("no_rope_layers", marks, allowed)
    return [config.one_of("no_rope_layers", mark, (0, 1)) == 1 for mark in marks[:num_layers]]


def _windows(config: Entries, have_rope: list[bool]) -> list[int | None]:
    """Returns the window of each layer: those without rotary embedding have one, unless layer_types names others."""
    has_window = config.flag("use_sliding_window", False) and config.has("sliding_window")
    window = read_window(config) if has_window else None
    if config.has("layer_types"):
        return layer_windows(config, len(have_rope), window)
    return [None if has_rope else window for has_rope in have_rope]


def _layers(config: Entries, sizes: LayerSizes) -> Iterator[LayerSpec]:
    bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    have_rope = _have_rope(config, sizes.num_layers)
    for has_rope, window in zip(have_rope, _windows(config, have_rope), strict=True):
        attention = self_attention(sizes, qkv_bias=bias, output_bias=bias, window=window)
        yield LayerSpec(attention if has_rope else replace(attention, rope=None), gated_mlp(sizes, bias=mlp_bias))


SMOLLM3 = Architecture(
    name="SmolLM3ForCausalLM",
    model_type="smollm3",
    keys=ConfigKeys(
        read={
            "sliding_window",
            "use_sliding_window",
            "attention_bias",
            "mlp_bias",
            "no_rope_layers",
            "no_rope_layer_interval",
        },
        without_effect={"max_window_layers"},  # older files have it, transformers does not read it
        kinds=WINDOW_KINDS | {"no_rope_layer_interval": Kind((int,), "an integer")},
    ),
    head_dim=lambda config, hidden, num_heads: read_head_dim(config, hidden // num_heads),
    num_kv_heads=lambda config, num_heads: read_kv_heads(config, num_heads, DEFAULT_KV_HEADS),
    layers=_layers,
    rope=RopeRules(default_theta=DEFAULT_THETA),
    is_tied=True,
)
