"""MistralForCausalLM: every layer has a window, or none has."""

from collections.abc import Iterator

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
from trunkline_worker.model.architectures.config_keys import OFF, ConfigKeys
from trunkline_worker.model.architectures.decoder_spec import LayerSpec
from trunkline_worker.model.checkpoint.entries import Entries

DEFAULT_KV_HEADS = 8


def _layers(config: Entries, sizes: LayerSizes) -> Iterator[LayerSpec]:
    for window in layer_windows(config, sizes.num_layers, read_window(config)):
        yield LayerSpec(self_attention(sizes, window=window), gated_mlp(sizes))


MISTRAL = Architecture(
    name="MistralForCausalLM",
    model_type="mistral",
    keys=ConfigKeys(read={"sliding_window"}, neutral={"attention_bias": OFF, "mlp_bias": OFF}),
    head_dim=lambda config, hidden, num_heads: read_head_dim(config, hidden // num_heads, null_is_absent=True),
    num_kv_heads=lambda config, _: config.integer("num_key_value_heads", 1, MOST_HEADS, default=DEFAULT_KV_HEADS),
    layers=_layers,
)
