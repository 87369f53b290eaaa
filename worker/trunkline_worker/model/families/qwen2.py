"""Qwen2ForCausalLM: biases of queries, keys and values; the last layers may have a window."""

from collections.abc import Iterator

from trunkline_worker.model.architectures.architecture import (
    MOST_WINDOW,
    Architecture,
    LayerSizes,
    gated_mlp,
    layer_windows,
    read_head_dim,
    read_kv_heads,
    read_window,
    self_attention,
)
from trunkline_worker.model.architectures.config_keys import INTEGER_OR_NULL, OFF, ConfigKeys, Kind
from trunkline_worker.model.architectures.decoder_spec import LayerSpec
from trunkline_worker.model.checkpoint.entries import Entries

DEFAULT_KV_HEADS = 32
DEFAULT_MAX_WINDOW_LAYERS = 28
WINDOW_KINDS = {"sliding_window": INTEGER_OR_NULL, "max_window_layers": Kind((int,), "an integer")}


def windows(config: Entries, num_layers: int) -> list[int | None]:
    """Returns the window of each layer. The first max_window_layers layers have none, unless layer_types names them."""
    window = read_window(config) if config.flag("use_sliding_window", False) else None
    if window is None or config.has("layer_types"):
        return layer_windows(config, num_layers, window)
    full_layers = config.integer("max_window_layers", 0, MOST_WINDOW, default=DEFAULT_MAX_WINDOW_LAYERS)
    return [window if layer >= full_layers else None for layer in range(num_layers)]


def _layers(config: Entries, sizes: LayerSizes) -> Iterator[LayerSpec]:
    for window in windows(config, sizes.num_layers):
        yield LayerSpec(self_attention(sizes, qkv_bias=True, window=window), gated_mlp(sizes))


QWEN2 = Architecture(
    name="Qwen2ForCausalLM",
    model_type="qwen2",
    keys=ConfigKeys(
        read={"sliding_window", "use_sliding_window", "max_window_layers"},
        without_effect={"attention_bias"},  # the biases are fixed; a file with others is refused because of its tensors
        kinds=WINDOW_KINDS,
        neutral={"mlp_bias": OFF},
    ),
    head_dim=lambda config, hidden, num_heads: read_head_dim(config, hidden // num_heads),
    num_kv_heads=lambda config, num_heads: read_kv_heads(config, num_heads, DEFAULT_KV_HEADS),
    layers=_layers,
)
