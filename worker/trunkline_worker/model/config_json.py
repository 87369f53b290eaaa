"""Reads config.json into the spec of a decoder, by the rules of transformers 5."""

from pathlib import Path
from typing import Any

from trunkline_worker.model.architectures.architecture import (
    MOST_HEADS,
    MOST_INTERMEDIATE,
    MOST_LAYERS,
    Architecture,
    LayerSizes,
)
from trunkline_worker.model.architectures.config_keys import check_keys
from trunkline_worker.model.architectures.decoder_spec import DecoderSpec
from trunkline_worker.model.architectures.rope_scaling import parse_rope
from trunkline_worker.model.architectures.unsupported import feature_of
from trunkline_worker.model.checkpoint.entries import Entries, listed, without
from trunkline_worker.model.checkpoint.gguf_file import is_gguf
from trunkline_worker.model.checkpoint.model_file import exists, read_json
from trunkline_worker.model.checkpoint.other_formats import check_format
from trunkline_worker.model.checkpoint.refusals import ModelError, shown
from trunkline_worker.model.registry import ARCHITECTURES

DTYPES = ("float32", "bfloat16", "float16")
ACTIVATIONS = ("silu", "swish")  # two names of one function

# Bounds far above any model, so that a mistaken number never allocates memory or reaches a kernel.
MOST_VOCAB = 1 << 24
MOST_HIDDEN = 1 << 17


def read_spec(directory: Path, ignored_keys: tuple[str, ...] = ()) -> DecoderSpec:
    """Returns the spec of a Hugging Face directory or a GGUF file. Raises ModelError with the file and the key that is
    not supported.

    ignored_keys: keys of config.json that are treated as absent
    """
    path, config = directory / "config.json", read_config(directory)
    try:
        return parse_spec(without(config, ignored_keys))
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


def read_config(directory: Path) -> dict[str, Any]:
    """Returns the config.json of a directory or a GGUF file. Raises ModelError if it has none."""
    try:
        if not directory.is_dir() and not is_gguf(directory):
            check_format(directory)
            raise ModelError(f"{directory} is neither a directory nor a GGUF file")
    except OSError as error:  # a parent directory may not be accessible
        raise ModelError(f"{directory} cannot be read: {error.strerror}") from None
    path = directory / "config.json"
    if not exists(path):
        check_format(directory)
    return read_json(path)


def parse_spec(config: dict[str, Any]) -> DecoderSpec:
    """Returns the spec that a config.json describes. Raises ModelError with the key that is missing, unknown, out of
    range or not supported."""
    entries = Entries(config)
    architecture = _architecture(entries)
    check_keys(config, architecture.name, architecture.keys)
    if "hidden_act" in config:
        entries.one_of("hidden_act", config["hidden_act"], ACTIVATIONS)
    hidden = entries.integer("hidden_size", 1, MOST_HIDDEN)
    num_heads = entries.integer("num_attention_heads", 1, MOST_HEADS)
    head_dim = architecture.head_dim(entries, hidden, num_heads)
    if head_dim < 2 or head_dim % 2:
        raise ModelError(f"head_dim {head_dim} is not supported: rotary embedding turns pairs, so it must be even")
    num_layers = entries.integer("num_hidden_layers", 1, MOST_LAYERS)
    rope, context = parse_rope(architecture.rope_config(entries), head_dim, architecture.rope)
    vocab_size = entries.integer("vocab_size", 1, MOST_VOCAB)
    intermediate = entries.integer("intermediate_size", 1, MOST_INTERMEDIATE)
    num_kv_heads = architecture.num_kv_heads(entries, num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}")
    sizes = LayerSizes(num_layers, hidden, intermediate, num_heads, num_kv_heads, head_dim, rope)
    return DecoderSpec(
        architecture=architecture.name,
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=entries.positive("rms_norm_eps", 1.0),
        layers=tuple(architecture.layers(entries, sizes)),
        context_length=context.served,
        most_context=context.most,
        tie_word_embeddings=entries.flag("tie_word_embeddings", architecture.is_tied),
        dtype=read_dtype(entries),
        multipliers=architecture.multipliers(entries),
    )


def _architecture(config: Entries) -> Architecture:
    """Returns the architecture that `architectures` names, or that of `model_type` if `architectures` is absent.

    `model_type` is always required, as in transformers. The two keys must agree.
    """
    model_type = config.text("model_type") if config.has("model_type") else None
    if config.has("architectures"):
        names = config.values["architectures"]
        if not isinstance(names, list) or len(names) != 1:
            raise config.refused("architectures", names, "a list of one of " + listed(ARCHITECTURES))
        name = names[0]
    else:
        name = next((each.name for each in ARCHITECTURES.values() if each.model_type == model_type), None)
    if not isinstance(name, str) or name not in ARCHITECTURES:
        named = name if isinstance(name, str) and name.isidentifier() else shown(name)
        if name is None:
            named = f"of model_type {shown(model_type)}"
        feature = feature_of(name) if isinstance(name, str) else None
        why = "" if feature is None else f" for its {feature}"
        raise ModelError(f"architecture {named} is not supported{why}; supported: {listed(ARCHITECTURES)}")
    architecture = ARCHITECTURES[name]
    if config.text("model_type") != architecture.model_type:
        raise ModelError(f"model_type {shown(model_type)} contradicts architectures {name}")
    return architecture


def read_dtype(config: Entries) -> str | None:
    """Returns the config's dtype. As in transformers, `dtype` takes precedence over its older name torch_dtype."""
    key = next((key for key in ("dtype", "torch_dtype") if config.has(key)), None)
    return None if key is None else config.one_of(key, config.text(key), DTYPES)
