"""Phi3ForCausalLM: Phi-3, Phi-3.5 and Phi-4. Fused tensors; a part of each head may be rotated."""

from collections.abc import Iterator

from trunkline_worker.model.architectures.architecture import (
    Architecture,
    LayerSizes,
    gated_mlp,
    read_head_dim,
    read_kv_heads,
    read_window,
    same_window,
    self_attention,
)
from trunkline_worker.model.architectures.config_keys import INTEGER_OR_NULL, OFF, ONE, SHARE, ConfigKeys, Kind
from trunkline_worker.model.architectures.decoder_spec import LayerSpec
from trunkline_worker.model.architectures.rope_scaling import RopeRules
from trunkline_worker.model.checkpoint.entries import Entries

QKV, GATE_UP = "self_attn.qkv_proj", "gate_up_proj"
TRAINED_CONTEXT = 4096


def _head_dim(config: Entries, hidden: int, num_heads: int) -> int:
    derived = hidden // num_heads
    head_dim = read_head_dim(config, derived)
    if head_dim != derived:  # transformers would expect as many factors of longrope as the derived one needs
        raise config.refused("head_dim", head_dim, f"hidden_size / num_attention_heads, which is {derived}")
    return derived


def _layers(config: Entries, sizes: LayerSizes) -> Iterator[LayerSpec]:
    window = same_window(config, read_window(config) if config.has("sliding_window") else None)
    layer = LayerSpec(
        self_attention(sizes, qkv_names=(QKV, QKV, QKV), window=window),
        gated_mlp(sizes, gate_up_names=(GATE_UP, GATE_UP)),
    )
    yield from [layer] * sizes.num_layers


PHI3 = Architecture(
    name="Phi3ForCausalLM",
    model_type="phi3",
    keys=ConfigKeys(
        read={"sliding_window", "partial_rotary_factor"},
        kinds={
            "sliding_window": INTEGER_OR_NULL,
            "resid_pdrop": SHARE,
            "embd_pdrop": SHARE,
            "original_max_position_embeddings": Kind((int,), "an integer"),
        },
        neutral={
            "attention_bias": OFF,
            "mlp_bias": OFF,
            "lm_head_bias": OFF,
            "use_sliding_window": (None, True),
            "full_attn_mod": ONE,
            "interpolate_factor": ONE,
        },
    ),
    head_dim=_head_dim,
    num_kv_heads=lambda config, num_heads: read_kv_heads(config, num_heads, num_heads),
    layers=_layers,
    rope=RopeRules(kinds=("default", "longrope"), is_partial=True, default_original=TRAINED_CONTEXT),
)
