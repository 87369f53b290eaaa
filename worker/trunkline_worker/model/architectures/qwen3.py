"""Qwen3ForCausalLM: norms of each head's query and key; windows as in Qwen2."""

from collections.abc import Iterator

from trunkline_worker.model.architectures.architecture import (
    Architecture,
    LayerSizes,
    gated_mlp,
    read_head_dim,
    read_kv_heads,
    self_attention,
)
from trunkline_worker.model.architectures.config_keys import OFF, ConfigKeys
from trunkline_worker.model.architectures.decoder_spec import LayerSpec
from trunkline_worker.model.architectures.qwen2 import WINDOW_KINDS, windows
from trunkline_worker.model.checkpoint.entries import Entries

DEFAULT_HEAD_DIM = 128
DEFAULT_KV_HEADS = 32


def _layers(config: Entries, sizes: LayerSizes) -> Iterator[LayerSpec]:
    bias = config.flag("attention_bias", False)
    for window in windows(config, sizes.num_layers):
        yield LayerSpec(
            self_attention(sizes, qkv_bias=bias, output_bias=bias, qk_norm="head", window=window), gated_mlp(sizes)
        )


QWEN3 = Architecture(
    name="Qwen3ForCausalLM",
    model_type="qwen3",
    keys=ConfigKeys(
        read={"sliding_window", "use_sliding_window", "max_window_layers", "attention_bias"},
        kinds=WINDOW_KINDS,
        neutral={"mlp_bias": OFF, "use_qk_norm": (None, True)},
    ),
    head_dim=lambda config, hidden, num_heads: read_head_dim(config, DEFAULT_HEAD_DIM),
    num_kv_heads=lambda config, num_heads: read_kv_heads(config, num_heads, DEFAULT_KV_HEADS),
    layers=_layers,
)
