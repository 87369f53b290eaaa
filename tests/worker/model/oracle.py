"""What transformers makes of a config.json: the truth for what Trunkline makes of it."""

import contextlib
import json
import logging
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from trunkline_worker.model.architectures.config_json import parse_spec
from trunkline_worker.model.architectures.registry import ARCHITECTURES
from trunkline_worker.model.checkpoint.refusals import ModelError
from trunkline_worker.model.decoder import Decoder
from trunkline_worker.model.loading import LoadedModel
from trunkline_worker.model.quantized.quantization_config import parse_schemes
from trunkline_worker.model.weights import DecoderWeights, StoredLinear

VOCAB = 61
WINDOWS = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
# architecture → what its config.json says in addition to that of all
OWN_KEYS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"attention_bias": True, "mlp_bias": True},
    "MistralForCausalLM": {"sliding_window": 7},
    "MixtralForCausalLM": {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 7},
    "OlmoeForCausalLM": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "norm_topk_prob": False,
        "attention_bias": True,
        "head_dim": 6,
    },
    "Qwen2ForCausalLM": WINDOWS,
    "Qwen2MoeForCausalLM": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": 14,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "qkv_bias": True,
    },
    "Qwen3ForCausalLM": WINDOWS | {"attention_bias": True},
    "Qwen3MoeForCausalLM": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": True,
    },
}


def base_config(architecture: str) -> dict[str, Any]:
    """A small config.json of this architecture, with every size spelt out."""
    return {
        "architectures": [architecture],
        "model_type": ARCHITECTURES[architecture].model_type,
        "vocab_size": VOCAB,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "eos_token_id": 0,
        **OWN_KEYS[architecture],
    }


def parse_problem(config: dict[str, Any]) -> str | None:
    """Why parse_spec() or parse_schemes() refuses; None: neither does. No other exception may come out of them."""
    try:
        parse_spec(config)
        parse_schemes(config)
    except ModelError as error:
        return checked(error)
    return None


def checked(error: ModelError) -> str:
    """The error's text, which is one line that any terminal and any protocol takes."""
    text = str(error)
    assert text.isascii()
    assert text.isprintable()
    assert len(text) < 600
    return text


def write_config(directory: Path, config: dict[str, Any]) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))


def their_model(directory: Path, config: dict[str, Any]) -> Any:
    """The model that transformers builds from this config.json, with seeded weights that are now in the directory.

    Raises whatever transformers raises.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    write_config(directory, config)
    with silence():
        make: Any = AutoModelForCausalLM.from_config
        # Its grouped products take no sizes that are not multiples of 16 bytes.
        model = make(AutoConfig.from_pretrained(directory), experts_implementation="eager").float().train(False)
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Large enough that every position, bias and norm shows in the logits.
            scale = 0.2 if "layernorm" in name or "norm" in name else 0.5
            parameter.add_(torch.randn(parameter.shape, generator=draw) * scale)
    tensors = {name: tensor.contiguous() for name, tensor in published_tensors(model).items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    save_file(tensors, directory / "model.safetensors")
    return model


def published_tensors(model: Any) -> dict[str, torch.Tensor]:
    """The tensors of a model by the names of checkpoints, in which each expert has its own."""
    from transformers.core_model_loading import revert_weight_conversion

    tensors: dict[str, torch.Tensor] = revert_weight_conversion(model, model.state_dict())
    return tensors


def parameter_of(model: Any, part: str) -> torch.Tensor:
    """The weight of a part that checkpoints name so; of one of an expert, its place within the weights of all."""
    at, _, own = part.partition(".experts.")
    if not own:
        found: torch.Tensor = model.get_parameter(f"{part}.weight")
        return found
    number, name = own.split(".")
    experts = model.get_submodule(f"{at}.experts")
    if name == "down_proj":
        down: torch.Tensor = experts.down_proj[int(number)]
        return down
    halves: dict[str, torch.Tensor] = dict(
        zip(("gate_proj", "up_proj"), experts.gate_up_proj[int(number)].chunk(2), strict=True)
    )
    return halves[name]


@torch.inference_mode()
def weights_of(model: LoadedModel) -> DecoderWeights[StoredLinear]:
    """Of a model that the reference computes."""
    assert isinstance(model.decoder, Decoder)
    return model.decoder._weights


def their_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """[len(tokens), vocab]"""
    with silence():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


@contextlib.contextmanager
def silence() -> Any:
    """transformers warns of what these tests do on purpose."""
    previous = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(previous)
