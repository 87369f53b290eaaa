"""Tiny random checkpoints of models of vectors and scores, by transformers, which is also the truth for them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

VOCAB = 97
PAD = 1

ENCODER: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4, "num_attention_heads": 6,
    "max_position_embeddings": 300, "pad_token_id": PAD, "sep_token_id": 4, "bos_token_id": 3,
    "eos_token_id": 4,
}  # fmt: skip
DECODER: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 300, "bos_token_id": 3, "eos_token_id": 4,
    "pad_token_id": None,
}  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """A kind of model: what transformers calls its classes, and its config."""

    family: str
    sizes: Mapping[str, Any]
    changes: Mapping[str, Any] = field(default_factory=dict)


ENCODERS = {
    "bert": Variant("Bert", ENCODER),
    "bert-tanh-gelu": Variant("Bert", ENCODER, {"hidden_act": "gelu_new", "type_vocab_size": 3}),
    "roberta": Variant("Roberta", ENCODER),
    "xlm-roberta": Variant("XLMRoberta", ENCODER, {"type_vocab_size": 1}),
    "modernbert": Variant("ModernBert", ENCODER, {"local_attention": 16}),
    "modernbert-biases": Variant(
        "ModernBert",
        ENCODER,
        {"local_attention": 10, "attention_bias": True, "mlp_bias": True, "norm_bias": True,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
         "classifier_pooling": "mean", "classifier_bias": True},
    ),
}  # fmt: skip
DECODERS = {
    "llama": Variant("Llama", DECODER),
    "mistral": Variant("Mistral", DECODER, {"sliding_window": 9, "head_dim": 16}),
    "qwen2": Variant("Qwen2", DECODER),
    "qwen3": Variant("Qwen3", DECODER, {"head_dim": 16, "tie_word_embeddings": True}),
}
VARIANTS = ENCODERS | DECODERS


def write_model(
    folder: Path,
    name: str,
    head: str,
    *,
    num_labels: int = 2,
    dtype: torch.dtype = torch.float32,
    matrix_noise: float = 0.1,
    **config: Any,
) -> Any:
    """Writes a checkpoint, and returns the model of transformers in float32.

    head: "Model", "ForSequenceClassification" or "ForCausalLM"
    matrix_noise: that is added to matrices; 0: they are as small as in trained models (initializer_range)
    """
    variant = VARIANTS[name]
    torch.manual_seed(7)
    settings = {**variant.sizes, **variant.changes, "num_labels": num_labels, **config}
    made = getattr(transformers, f"{variant.family}Config")(**settings)
    model = getattr(transformers, f"{variant.family}{head}")(made)
    with torch.no_grad():
        for parameter in model.parameters():  # so that biases and norms matter
            parameter.add_(torch.randn_like(parameter) * (matrix_noise if parameter.ndim > 1 else 0.1))
        model.to(dtype).save_pretrained(folder)
    return model.float().eval()


def write_modules(
    folder: Path, *, pooling: str, normalize: bool = True, dense: Sequence[tuple[int, int]] = (), **files: Any
) -> dict[str, torch.Tensor]:
    """Writes what sentence-transformers does beside a model, and returns the weights of its Dense modules by folder.

    pooling: the key of 1_Pooling/config.json that is true; dense: rows and inner size of each
    files: names without .json, and their contents
    """
    kinds = ["Transformer", "Pooling", *["Dense"] * len(dense), *["Normalize"] * normalize]
    modules = []
    for index, kind in enumerate(kinds):
        path = f"{index}_{kind}" if index else ""
        (folder / path).mkdir(exist_ok=True)
        modules.append({"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"})
    (folder / "modules.json").write_text(json.dumps(modules))
    flags = dict.fromkeys(("pooling_mode_cls_token", "pooling_mode_mean_tokens", "pooling_mode_max_tokens"), False)
    (folder / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": 48, **flags, pooling: True}))
    weights = {}
    for index, (rows, inner) in enumerate(dense, start=2):
        at, weight = f"{index}_Dense", torch.randn(rows, inner) / inner**0.5
        tanh = "torch.nn.modules.activation.Tanh"
        config = {"in_features": inner, "out_features": rows, "bias": False, "activation_function": tanh}
        (folder / at / "config.json").write_text(json.dumps(config))
        save_file({"linear.weight": weight}, folder / at / "model.safetensors")
        weights[at] = weight
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return weights


def write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer of words "w5", "w6" and so on, whose ids are their numbers."""
    words = {f"w{token_id}": token_id for token_id in range(VOCAB)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
