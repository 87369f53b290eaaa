"""What distinguishes one decoder from another: a small spec, read from config.json."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trunkline_worker.model.errors import ModelError

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding; the scaling types are those of Hugging Face's `rope_scaling`."""

    theta: float
    kind: str = "default"
    factor: float = 1.0  # linear, llama3
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_context: int = 8192  # llama3


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
    context_length: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]  # per layer: positions that a query sees, its own included; None: all
    dtype: str  # of the checkpoint


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ModelError naming the file."""
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelError(f"{path} is missing") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path} holds no JSON object")
    return data


def read_spec(directory: Path) -> DecoderSpec:
    """The spec of a Hugging Face directory. Raises ModelError naming what is missing or not supported."""
    if not directory.is_dir():
        raise ModelError(f"{directory} is not a directory")
    path = directory / "config.json"
    config = read_json(path)
    try:
        return parse_spec(config)
    except KeyError as missing:
        raise ModelError(f"{path} lacks {missing.args[0]}") from None
    except (TypeError, ValueError) as error:
        raise ModelError(f"{path}: {error}") from None


def parse_spec(config: dict[str, Any]) -> DecoderSpec:
    """Raises KeyError for a missing entry, ModelError for one that is not supported."""
    architecture = (config.get("architectures") or ["none"])[0]
    if architecture not in ARCHITECTURES:
        raise ModelError(f"architecture {architecture} is not supported; supported: {', '.join(ARCHITECTURES)}")
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise ModelError(f"hidden_act {activation} is not supported; supported: silu")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise ModelError(f"quantization_config ({method}) is not supported: use an unquantised checkpoint")
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    if kv_heads < 1 or heads % kv_heads:
        raise ModelError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    llama = architecture == "LlamaForCausalLM"
    qwen2, qwen3 = architecture == "Qwen2ForCausalLM", architecture == "Qwen3ForCausalLM"
    attention_bias = bool(config.get("attention_bias", False))
    return DecoderSpec(
        architecture=architecture,
        vocab_size=int(config["vocab_size"]),
        hidden_size=int(config["hidden_size"]),
        intermediate_size=int(config["intermediate_size"]),
        num_layers=int(config["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
        rms_norm_eps=float(config["rms_norm_eps"]),
        rope=_parse_rope(config),
        context_length=int(config["max_position_embeddings"]),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=qwen2 or ((llama or qwen3) and attention_bias),
        output_bias=(llama or qwen3) and attention_bias,
        mlp_bias=llama and bool(config.get("mlp_bias", False)),
        qk_norm=qwen3,
        windows=_parse_windows(config, architecture),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
    )


def _parse_rope(config: dict[str, Any]) -> RopeSpec:
    # transformers 5 writes rope_parameters with rope_theta inside; before it was rope_scaling beside rope_theta.
    scaling: dict[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise ModelError(f"RoPE scaling {kind} is not supported; supported: {', '.join(ROPE_TYPES)}")
    if kind == "default":
        return RopeSpec(theta)
    if kind == "linear":
        return RopeSpec(theta, kind, factor=float(scaling["factor"]))
    return RopeSpec(
        theta,
        kind,
        factor=float(scaling["factor"]),
        low_freq_factor=float(scaling["low_freq_factor"]),
        high_freq_factor=float(scaling["high_freq_factor"]),
        original_context=int(scaling["original_max_position_embeddings"]),
    )


def _parse_windows(config: dict[str, Any], architecture: str) -> tuple[int | None, ...]:
    num_layers = int(config["num_hidden_layers"])
    window = config.get("sliding_window")
    if architecture == "LlamaForCausalLM" or not window:
        return (None,) * num_layers
    window = int(window)
    if architecture == "MistralForCausalLM":
        return (window,) * num_layers
    if not config.get("use_sliding_window", False):
        return (None,) * num_layers
    if kinds := config.get("layer_types"):
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    full_layers = int(config.get("max_window_layers", num_layers))
    return tuple(window if layer >= full_layers else None for layer in range(num_layers))
