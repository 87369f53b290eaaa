"""SeedOssForCausalLM: Llama with a bias of queries, keys and values, and another of attention's output."""

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
from trunkline_worker.model.architectures.config_keys import NONE, OFF, SHARE, ConfigKeys, Kind
from trunkline_worker.model.architectures.decoder_spec import LayerSpec
from trunkline_worker.model.checkpoint.entries import Entries

DEFAULT_HEAD_DIM = 128
DEFAULT_KV_HEADS = 8


def _head_dim(config: Entries, hidden: int, num_heads: int) -> int:
    is_null = "head_dim" in config.values and not config.has("head_dim")
    return hidden // num_heads if is_null else read_head_dim(config, DEFAULT_HEAD_DIM)


def _layers(config: Entries, sizes: LayerSizes) -> Iterator[LayerSpec]:
    bias, output_bias = config.flag("attention_bias", True), config.flag("attention_out_bias", False)
    mlp_bias = config.flag("mlp_bias", False)
    for window in layer_windows(config, sizes.num_layers, None):
        attention = self_attention(sizes, qkv_bias=bias, output_bias=output_bias, window=window)
        yield LayerSpec(attention, gated_mlp(sizes, bias=mlp_bias))


SEED_OSS = Architecture(
    name="SeedOssForCausalLM",
    model_type="seed_oss",
    keys=ConfigKeys(
        read={"attention_bias", "attention_out_bias", "mlp_bias"},
        without_effect={"residual_dropout", "max_window_layers"},
        kinds={"residual_dropout": SHARE, "pretraining_tp": Kind((int,), "an integer")},
        neutral={"sliding_window": NONE, "use_sliding_window": OFF},
    ),
    head_dim=_head_dim,
    num_kv_heads=lambda config, num_heads: read_kv_heads(config, num_heads, DEFAULT_KV_HEADS),
    layers=_layers,
)
