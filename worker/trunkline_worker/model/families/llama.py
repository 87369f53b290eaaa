"""LlamaForCausalLM: Llama 2 and 3, and the many models of their form, such as SmolLM2, Yi and Falcon 3."""

from collections.abc import Iterator
from types import NoneType

from trunkline_worker.model.architectures.architecture import (
    Architecture,
    LayerSizes,
    gated_mlp,
    layer_windows,
    read_head_dim,
    read_kv_heads,
    self_attention,
)
from trunkline_worker.model.architectures.config_keys import INTEGER_OR_NULL, NONE, OFF, ConfigKeys, Kind
from trunkline_worker.model.architectures.decoder_spec import LayerSpec
from trunkline_worker.model.checkpoint.entries import Entries
from trunkline_worker.model.checkpoint.refusals import ModelError


def _head_dim(config: Entries, hidden: int, num_heads: int) -> int:
    if hidden % num_heads:
        raise ModelError(f"hidden_size {hidden} is not a multiple of num_attention_heads {num_heads}")
    return read_head_dim(config, hidden // num_heads, null_is_absent=True)


def _layers(config: Entries, sizes: LayerSizes) -> Iterator[LayerSpec]:
    bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    for window in layer_windows(config, sizes.num_layers, None):
        yield LayerSpec(
            self_attention(sizes, qkv_bias=bias, output_bias=bias, window=window), gated_mlp(sizes, bias=mlp_bias)
        )


LLAMA = Architecture(
    name="LlamaForCausalLM",
    model_type="llama",
    keys=ConfigKeys(
        read={"attention_bias", "mlp_bias"},
        without_effect={"max_window_layers"},  # no layer has a window
        kinds={
            "attention_dropout": Kind((float, int, NoneType), "a number in [0, 1] or null"),
            "pretraining_tp": INTEGER_OR_NULL,
        },
        neutral={"sliding_window": NONE, "use_sliding_window": OFF},
    ),
    head_dim=_head_dim,
    num_kv_heads=lambda config, num_heads: read_kv_heads(config, num_heads, num_heads),
    layers=_layers,
)
