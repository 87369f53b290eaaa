"""Checkpoints for measurements of embeddings and rerankings: a random Qwen3, with the tokenizer of a real model."""

import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer

from trunkline_bench.engine.random_model import RANDOM_22M, write_random_model
from trunkline_bench.pooling.documents import LONGEST

RANDOM_QWEN3 = RANDOM_22M | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "max_position_embeddings": LONGEST,
    "rope_theta": 1e6,
}
CHAT_MARKS = ["<|im_start|>", "<|im_end|>"]  # without them no model is taken for a reranker of the Qwen3 kind
MODULES = ("Transformer", "Pooling", "Normalize")


def tokenizer_of(model: Path) -> Tokenizer:
    """Returns a model's tokenizer, which neither pads nor cuts."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def write_reranker(folder: Path, tokenizer: Tokenizer) -> None:
    """Writes a random Qwen3 that generates, and so can rank with --task score."""
    write_random_model(folder, RANDOM_QWEN3)
    tokenizer.add_special_tokens(CHAT_MARKS)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]", "model_max_length": LONGEST}
    config["model_input_names"] = ["input_ids", "attention_mask"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_embedder(folder: Path, reranker: Path) -> None:
    """Writes the same model with what sentence-transformers puts beside one that embeds as Qwen3-Embedding does."""
    shutil.copytree(reranker, folder)
    modules = []
    for index, kind in enumerate(MODULES):
        path = f"{index}_{kind}" if index else ""
        (folder / path).mkdir(exist_ok=True)
        modules.append({"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"})
    (folder / "modules.json").write_text(json.dumps(modules))
    pooling = {"word_embedding_dimension": RANDOM_QWEN3["hidden_size"], "pooling_mode_lasttoken": True}
    pooling |= {f"pooling_mode_{name}": False for name in ("cls_token", "mean_tokens", "max_tokens")}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    limits = {"max_seq_length": LONGEST, "do_lower_case": False}
    (folder / "sentence_bert_config.json").write_text(json.dumps(limits))
