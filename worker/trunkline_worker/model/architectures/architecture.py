"""What a module of an architecture says: the keys of its config.json, and the layers that follow from them.

The functions below read the keys that architectures have in common, and build layers of the usual form, with the names
that transformers gives to their tensors.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from trunkline_kernels.routing_rule import RoutingRule
from trunkline_worker.model.architectures.config_keys import ConfigKeys
from trunkline_worker.model.architectures.decoder_spec import (
    AttentionSpec,
    ExpertsSpec,
    GatedSpec,
    LayerSpec,
    LinearSpec,
    Multipliers,
)
from trunkline_worker.model.architectures.rope_scaling import USUAL_ROPE, RopeRules, RopeSpec
from trunkline_worker.model.checkpoint.entries import Entries
from trunkline_worker.model.checkpoint.refusals import ModelError, shown

# Bounds far above any model, so that a mistaken number never allocates memory or reaches a kernel.
MOST_LAYERS = 1 << 12
MOST_HEADS = 1 << 12
MOST_HEAD_DIM = 1 << 12
MOST_WINDOW = (1 << 31) - 1
MOST_INTERMEDIATE = 1 << 20
MOST_EXPERTS = 1 << 12
MOST_CHOSEN = 64  # experts of a token: results of all of them are in memory at once, and kernels unroll their choice

EXPERTS_KEYS = "num_experts", "num_local_experts"  # two names of one number

DEFAULT_WINDOW = 4096  # of transformers, if the key is absent

FULL, SLIDING = "full_attention", "sliding_attention"
LAYER_TYPES = {FULL: FULL, SLIDING: SLIDING, "attention": FULL}  # "attention" is an older name


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """What all layers of a model have in common."""

    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec


@dataclass(frozen=True, slots=True)
class Architecture:
    """How to read the config.json of an architecture. The functions raise ModelError with the key."""

    name: str  # in `architectures`
    model_type: str
    keys: ConfigKeys
    head_dim: Callable[[Entries, int, int], int]  # takes hidden size and number of heads
    num_kv_heads: Callable[[Entries, int], int]  # takes the number of heads
    layers: Callable[[Entries, LayerSizes], Iterable[LayerSpec]]
    rope: RopeRules = USUAL_ROPE
    rope_config: Callable[[Entries], Entries] = lambda config: config  # with the keys where RopeRules expect them
    multipliers: Callable[[Entries], Multipliers] = lambda _: Multipliers()
    is_tied: bool = False  # if tie_word_embeddings is absent


def read_head_dim(config: Entries, default: int, *, null_is_absent: bool = False) -> int:
    """Returns head_dim. default: if it is absent"""
    has_own = config.has("head_dim") if null_is_absent else "head_dim" in config.values
    return config.integer("head_dim", 1, MOST_HEAD_DIM) if has_own else default


def read_kv_heads(config: Entries, num_heads: int, default: int) -> int:
    """Returns the number of KV heads. null means the number of query heads.  default: if it is absent"""
    if config.values.get("num_key_value_heads", default) is None:
        return num_heads
    return config.integer("num_key_value_heads", 1, MOST_HEADS, default=default)


def read_window(config: Entries) -> int | None:
    """Returns sliding_window; None if it is null."""
    if "sliding_window" in config.values and not config.has("sliding_window"):
        return None
    return config.integer("sliding_window", 1, MOST_WINDOW, default=DEFAULT_WINDOW)


def layer_windows(config: Entries, num_layers: int, window: int | None) -> list[int | None]:
    """Returns the window of each layer: all have `window`, or those that layer_types names."""
    if not config.has("layer_types"):
        return [window] * num_layers
    kinds = config.values["layer_types"]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise config.refused("layer_types", kinds, f"a list of {num_layers}, as many as num_hidden_layers")
    kinds = [LAYER_TYPES[config.one_of("layer_types", kind, tuple(LAYER_TYPES))] for kind in kinds]
    if SLIDING in kinds and window is None:
        raise ModelError(f"layer_types has {SLIDING}, but no sliding_window is in use")
    return [window if kind == SLIDING else None for kind in kinds]


def same_window(config: Entries, window: int | None) -> int | None:
    """Returns the window of architectures whose layers all have the same: transformers ignores their layer_types."""
    if config.has("layer_types"):
        raise config.refused("layer_types", config.values["layer_types"], "null")
    return window


def self_attention(
    sizes: LayerSizes,
    *,
    qkv_names: tuple[str, str, str] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    norm: str | None = "input_layernorm",
    post_norm: str | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    qk_norm: Literal["head", "all heads"] | None = None,
    window: int | None,
) -> AttentionSpec:
    heads, kv_heads = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    qkv = tuple(zip(qkv_names, (heads, kv_heads, kv_heads), strict=True))
    return AttentionSpec(
        norm=norm,
        qkv=LinearSpec(qkv, sizes.hidden, qkv_bias, "out"),
        query_norm="self_attn.q_norm" if qk_norm else None,
        key_norm="self_attn.k_norm" if qk_norm else None,
        rope=sizes.rope,
        window=window,
        output=LinearSpec((("self_attn.o_proj", sizes.hidden),), heads, output_bias, "in"),
        post_norm=post_norm,
        qk_norm_span=qk_norm or "head",
    )


def gated_mlp(
    sizes: LayerSizes,
    *,
    gate_up_names: tuple[str, str] = ("gate_proj", "up_proj"),
    norm: str | None = "post_attention_layernorm",
    post_norm: str | None = None,
    bias: bool = False,
    at: str = "mlp",
    intermediate: int | None = None,
) -> GatedSpec:
    """at: the part that has the products; intermediate: None: as in LayerSizes"""
    inner = intermediate or sizes.intermediate
    gate_up = tuple((f"{at}.{name}", inner) for name in gate_up_names)
    return GatedSpec(
        norm=norm,
        gate_up=LinearSpec(gate_up, sizes.hidden, bias, "out"),
        down=LinearSpec(((f"{at}.down_proj", sizes.hidden),), inner, bias, "in"),
        post_norm=post_norm,
    )


def read_rule(config: Entries, key: str, *, renormalized: bool) -> RoutingRule:
    """Returns the rule of a router that chooses by softmax.

    key: the one of EXPERTS_KEYS that published configs have
    """
    present = [each for each in EXPERTS_KEYS if each in config.values] or [key]
    num_experts = config.integer(present[0], 1, MOST_EXPERTS)
    if any(config.values[each] != num_experts for each in present):
        values = [shown(config.values[each]) for each in present]
        raise ModelError(f"num_experts {values[0]} contradicts num_local_experts {values[1]}")
    return RoutingRule(
        num_experts, config.integer("num_experts_per_tok", 1, min(num_experts, MOST_CHOSEN)), renormalized=renormalized
    )


def gated_experts(
    sizes: LayerSizes,
    rule: RoutingRule,
    *,
    intermediate: int,
    at: str = "mlp",
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> ExpertsSpec:
    """at: the part that has router and experts; parts: names of an expert's gate, up and down"""
    gate, up, down = parts
    experts = [f"{at}.experts.{number}" for number in range(rule.num_experts)]
    gate_up = tuple((f"{expert}.{part}", intermediate) for expert in experts for part in (gate, up))
    return ExpertsSpec(
        norm="post_attention_layernorm",
        router=LinearSpec(((f"{at}.gate", rule.num_experts),), sizes.hidden, False, "out"),
        rule=rule,
        gate_up=LinearSpec(gate_up, sizes.hidden, False, "out"),
        down=LinearSpec(tuple((f"{expert}.{down}", sizes.hidden) for expert in experts), intermediate, False, "in"),
        post_norm=None,
    )
