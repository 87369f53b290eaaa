"""The spec of a decoder, read from config.json: everything in which supported models differ."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trunkline_worker.model.checkpoint.config_keys import LLAMA, MISTRAL, MODEL_TYPES, QWEN2, QWEN3, check_keys, without
from trunkline_worker.model.checkpoint.entries import Entries, listed
from trunkline_worker.model.checkpoint.model_file import read_json
from trunkline_worker.model.checkpoint.other_formats import check_format
from trunkline_worker.model.checkpoint.refusals import ModelError, shown
from trunkline_worker.model.checkpoint.rope_scaling import RopeSpec, parse_rope

ARCHITECTURES = tuple(MODEL_TYPES)
DTYPES = ("float32", "bfloat16", "float16")
ACTIVATIONS = ("silu", "swish")  # two names of one function

# Bounds far above any model, so that a mistaken number never allocates memory or reaches a kernel.
MOST_VOCAB = 1 << 24
MOST_HIDDEN = 1 << 17
MOST_INTERMEDIATE = 1 << 20
MOST_LAYERS = 1 << 12
MOST_HEADS = 1 << 12
MOST_HEAD_DIM = 1 << 12
MOST_WINDOW = (1 << 31) - 1

# The defaults of transformers for absent keys.
DEFAULT_KV_HEADS = {MISTRAL: 8, QWEN2: 32, QWEN3: 32}
DEFAULT_QWEN3_HEAD_DIM = 128
DEFAULT_WINDOW = 4096
DEFAULT_MAX_WINDOW_LAYERS = 28

FULL, SLIDING = "full_attention", "sliding_attention"
LAYER_TYPES = {FULL: FULL, SLIDING: SLIDING, "attention": FULL}  # "attention" is an older name


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Sizes and choices of a pre-norm decoder with rotary attention and a SwiGLU feed-forward."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeSpec
    context_length: int  # default, without --context-length
    most_context: int  # maximum of --context-length
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]  # by layer: positions that a query sees, including its own; None: all
    dtype: str | None  # as the config names it; None: the config has none


def read_spec(directory: Path, ignored_keys: tuple[str, ...] = ()) -> DecoderSpec:
    """Returns the spec of a Hugging Face directory. Raises ModelError with the file and the key that is not supported.

    ignored_keys: keys of config.json that are treated as absent
    """
    try:
        if not directory.is_dir():
            check_format(directory)
            raise ModelError(f"{directory} is not a directory")
    except OSError as error:  # a parent directory may not be accessible
        raise ModelError(f"{directory} cannot be read: {error.strerror}") from None
    path = directory / "config.json"
    if not os.path.lexists(path):
        check_format(directory)
    config = read_json(path)
    try:
        return parse_spec(without(config, ignored_keys))
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


def parse_spec(config: dict[str, Any]) -> DecoderSpec:
    """Returns the spec that a config.json describes, by the rules of transformers 5. Raises ModelError with the key
    that is missing, unknown, out of range or not supported."""
    entries = Entries(config)
    architecture = _architecture(entries)
    check_keys(config, architecture)
    if "hidden_act" in config:
        entries.one_of("hidden_act", config["hidden_act"], ACTIVATIONS)
    hidden = entries.integer("hidden_size", 1, MOST_HIDDEN)
    heads = entries.integer("num_attention_heads", 1, MOST_HEADS)
    head_dim = _head_dim(entries, architecture, hidden, heads)
    num_layers = entries.integer("num_hidden_layers", 1, MOST_LAYERS)
    rope, context = parse_rope(entries, head_dim)
    reads_bias = architecture in (LLAMA, QWEN3)
    attention_bias = reads_bias and entries.flag("attention_bias", False)
    return DecoderSpec(
        architecture=architecture,
        vocab_size=entries.integer("vocab_size", 1, MOST_VOCAB),
        hidden_size=hidden,
        intermediate_size=entries.integer("intermediate_size", 1, MOST_INTERMEDIATE),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=_kv_heads(entries, architecture, heads),
        head_dim=head_dim,
        rms_norm_eps=entries.positive("rms_norm_eps", 1.0),
        rope=rope,
        context_length=context.served,
        most_context=context.most,
        tie_word_embeddings=entries.flag("tie_word_embeddings", False),  # absent: untied in all four architectures
        qkv_bias=architecture == QWEN2 or attention_bias,
        output_bias=attention_bias,
        mlp_bias=architecture == LLAMA and entries.flag("mlp_bias", False),
        qk_norm=architecture == QWEN3,
        windows=_windows(entries, architecture, num_layers),
        dtype=_dtype(entries),
    )


def _architecture(config: Entries) -> str:
    """Returns the architecture that `architectures` names, or that of `model_type` if `architectures` is absent.

    `model_type` is always required, as in transformers. The two keys must agree.
    """
    model_type = config.text("model_type") if config.has("model_type") else None
    if config.has("architectures"):
        names = config.values["architectures"]
        if not isinstance(names, list) or len(names) != 1:
            raise config.refused("architectures", names, "a list of one of " + listed(ARCHITECTURES))
        architecture = names[0]
    else:
        architecture = next((name for name, kind in MODEL_TYPES.items() if kind == model_type), None)
    if architecture not in ARCHITECTURES:
        named = architecture if isinstance(architecture, str) and architecture.isidentifier() else shown(architecture)
        if architecture is None:
            named = f"of model_type {shown(model_type)}"
        raise ModelError(f"architecture {named} is not supported; supported: {listed(ARCHITECTURES)}")
    if config.text("model_type") != MODEL_TYPES[architecture]:
        raise ModelError(f"model_type {shown(model_type)} contradicts architectures {architecture}")
    return str(architecture)


def _head_dim(config: Entries, architecture: str, hidden: int, heads: int) -> int:
    """Returns head_dim. If it is absent, it is hidden size / heads, for Qwen3 a default. null means the same as absent
    for Llama and Mistral, and is refused for the others."""
    if architecture == LLAMA and hidden % heads:
        raise ModelError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    if architecture == QWEN3:
        return _even(config.integer("head_dim", 1, MOST_HEAD_DIM, default=DEFAULT_QWEN3_HEAD_DIM))
    may_be_null = architecture in (LLAMA, MISTRAL)
    has_own = config.has("head_dim") if may_be_null else "head_dim" in config.values
    return _even(config.integer("head_dim", 1, MOST_HEAD_DIM) if has_own else hidden // heads)


def _even(head_dim: int) -> int:
    if head_dim < 2 or head_dim % 2:
        raise ModelError(f"head_dim {head_dim} is not supported: rotary embedding turns pairs, so it must be even")
    return head_dim


def _kv_heads(config: Entries, architecture: str, heads: int) -> int:
    """Returns the number of KV heads. null means the number of query heads, except for Mistral, where it is refused;
    absent, the architecture's default."""
    default = DEFAULT_KV_HEADS.get(architecture, heads)
    has_null = architecture != MISTRAL and config.values.get("num_key_value_heads", default) is None
    kv_heads = heads if has_null else config.integer("num_key_value_heads", 1, MOST_HEADS, default=default)
    if heads % kv_heads:
        raise ModelError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    return kv_heads


def _dtype(config: Entries) -> str | None:
    """Returns the config's dtype. As in transformers, `dtype` takes precedence over its older name torch_dtype."""
    key = next((key for key in ("dtype", "torch_dtype") if config.has(key)), None)
    return None if key is None else config.one_of(key, config.text(key), DTYPES)


def _windows(config: Entries, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    window = _window(config, architecture)
    if config.has("layer_types"):
        kinds = _layer_types(config, num_layers)
        if SLIDING in kinds and window is None:
            raise ModelError(f"layer_types has {SLIDING}, but no sliding_window is in use")
        return tuple(window if kind == SLIDING else None for kind in kinds)
    if architecture == MISTRAL or window is None:
        return (window,) * num_layers
    full_layers = config.integer("max_window_layers", 0, MOST_WINDOW, default=DEFAULT_MAX_WINDOW_LAYERS)
    return tuple(window if layer >= full_layers else None for layer in range(num_layers))


def _window(config: Entries, architecture: str) -> int | None:
    """Returns the number of positions that a query sees in layers with a window; None if no layer has one."""
    if architecture == LLAMA or (architecture != MISTRAL and not config.flag("use_sliding_window", False)):
        return None
    if "sliding_window" in config.values and not config.has("sliding_window"):
        return None
    return config.integer("sliding_window", 1, MOST_WINDOW, default=DEFAULT_WINDOW)


def _layer_types(config: Entries, num_layers: int) -> list[str]:
    kinds = config.values["layer_types"]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise config.refused("layer_types", kinds, f"a list of {num_layers}, as many as num_hidden_layers")
    return [LAYER_TYPES[config.one_of("layer_types", kind, tuple(LAYER_TYPES))] for kind in kinds]
