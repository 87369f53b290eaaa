"""Small random GGUF files, written by llama.cpp's own package, and what transformers computes with their values."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray

from tests.worker.model.oracle import base_config, their_model

KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
# Bytes of a block that are scales of 16 bits; others are random.
SCALES = {"Q8_0": [(0, 1e-3)], "Q4_0": [(0, 0.02)], "Q4_1": [(0, 0.02), (2, -0.15)], "Q4_K": [(0, 4e-4), (2, 2e-3)]}
SCALES["Q6_K"] = [(208, 5e-5)]
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
SIZES = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
TOKENS = ["<s>", "</s>", "<think>", "a", "b", "ab", *(f"t{index}" for index in range(6, 61))]
TYPES = [3, 3, 4, *[1] * 58]


def random_rows(kind: str, num_rows: int, num_columns: int, draw: np.random.Generator) -> NDArray[np.uint8]:
    """[num_rows, bytes of a row] of a format; all bits but those of the scales are random."""
    form = gguf.GGMLQuantizationType[kind]
    if kind not in SCALES:
        values = draw.normal(0, 0.08, (num_rows, num_columns)).astype(np.float32)
        stored: NDArray[np.uint8] = gguf.quantize(values, form).view(np.uint8)
        return stored
    values_of_block, num_bytes = gguf.GGML_QUANT_SIZES[form]
    blocks = draw.integers(0, 256, (num_rows, num_columns // values_of_block, num_bytes), np.uint8)
    for at, scale in SCALES[kind]:
        blocks[..., at : at + 2] = np.array([scale], np.float16).view(np.uint8)
    return blocks.reshape(num_rows, -1)


def values_of(stored: NDArray[np.uint8], kind: str) -> torch.Tensor:
    """The values, as the package dequantises them."""
    form = gguf.GGMLQuantizationType[kind]
    plain = {"F32": np.float32, "F16": np.float16}
    values = stored.view(plain[kind]) if kind in plain else gguf.dequantize(stored, form)
    return torch.from_numpy(values.astype(np.float32))


def order_of_rows(name: str, architecture: str, config: dict[str, Any]) -> torch.Tensor | None:
    """Row i of a stored tensor is row order[i] of transformers'; None: in the same order. In files of Llama the two
    halves of a head are interleaved, as convert_hf_to_gguf.py does it."""
    if architecture != "llama" or not ("q_proj" in name or "k_proj" in name):
        return None
    heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
    rows = torch.arange(heads * config["head_dim"])
    return rows.view(heads, 2, -1).transpose(1, 2).flatten()


def config_for(architecture: str, **changes: Any) -> dict[str, Any]:
    return base_config(ARCHITECTURES[architecture]) | SIZES | {"use_sliding_window": False} | changes


def writer_of(path: Path, architecture: str, config: dict[str, Any]) -> Any:
    """A writer with the metadata of a model, and a tokenizer."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_types(TYPES)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(1)
    return writer


def finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_model(path: Path, architecture: str, kinds: Sequence[str], config: dict[str, Any], writer: Any = None) -> Any:
    """Writes a file whose matrices have these formats in turn; returns transformers' model with the same values."""
    theirs = their_model(path.parent / f"{path.stem}-config", config)
    writer = writer or writer_of(path, architecture, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config["num_hidden_layers"])
    draw, turn = np.random.default_rng(7), 0
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            stored_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
            order = order_of_rows(name, architecture, config)
            if parameter.dim() == 1:
                values = parameter.data if order is None else parameter.data[order]
                writer.add_tensor(stored_name, values.numpy())
                continue
            kind, turn = kinds[turn % len(kinds)], turn + 1
            rows = random_rows(kind, parameter.shape[0], parameter.shape[1], draw)
            parameter[slice(None) if order is None else order] = values_of(rows, kind)
            form = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(stored_name, rows, raw_shape=rows.shape, raw_dtype=form)
    finish(writer)
    return theirs


def mutants(data: bytes, count: int, most: int) -> Iterator[bytes]:
    """Copies of a file, each with a few other bytes among the first `most`, or cut short there."""
    draw = np.random.default_rng(11)
    for _ in range(count):
        copy = bytearray(data)
        for _ in range(int(draw.integers(1, 4))):
            copy[int(draw.integers(4, most))] = int(draw.choice([0, 1, 3, 8, 9, 127, 128, 255]))
        yield bytes(copy if draw.random() < 0.8 else copy[: int(draw.integers(0, most))])
