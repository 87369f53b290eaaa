"""The tensors of a GGUF file, under the names that transformers gives them and with its order of rows."""

import re
import warnings
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from trunkline_kernels.quantized_weight import QuantizedWeight
from trunkline_worker.model.checkpoint.dequantization import PLAIN, quantized, values_of
from trunkline_worker.model.checkpoint.gguf_config import EMBEDDING, HEAD, ROPE_FACTORS
from trunkline_worker.model.checkpoint.gguf_file import GgufFile

OUTSIDE = {"model.embed_tokens.weight": EMBEDDING, "lm_head.weight": HEAD, "model.norm.weight": "output_norm.weight"}
IN_LAYERS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OF_LAYERS = {stored: name for name, stored in IN_LAYERS.items()}
# What llama.cpp's converter permutes, in files of Llama alone → the number of heads: the first key that a file has.
HEADS = {
    "attn_q": ["llama.attention.head_count"],
    "attn_k": ["llama.attention.head_count_kv", "llama.attention.head_count"],
}


class Header(NamedTuple):
    """What safetensors' get_slice() tells of a tensor."""

    shape: list[int]
    dtype: str

    def get_shape(self) -> list[int]:
        return self.shape

    def get_dtype(self) -> str:
        """By safetensors' names. Quantised values have none; BF16 is what they are served in by default."""
        return self.dtype if self.dtype in PLAIN else "BF16"


class GgufTensors:
    """The tensors, with the methods of safetensors' safe_open()."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._stored = {_transformers_name(name): name for name in file.tensors if name != ROPE_FACTORS}

    def keys(self) -> list[str]:
        return list(self._stored)

    def get_slice(self, name: str) -> Header:
        tensor = self._file.tensors[self._stored[name]]
        return Header(tensor.shape, tensor.format.name)

    def get_tensor(self, name: str) -> Tensor:
        """Returns the values, dequantised to float32 if they are quantised."""
        stored = self._stored[name]
        tensor = self._file.tensors[stored]
        return self._in_order(values_of(self._rows(stored), tensor.format).view(tensor.shape), stored)

    def quantized(self, name: str, device: torch.device) -> QuantizedWeight | None:
        """Returns a matrix as it is stored; None: it is not quantised, or cannot be kept in this form.

        device: on the meta device, only its shapes are known
        """
        stored = self._stored[name]
        return quantized(self._in_order(self._rows(stored).to(device), stored), self._file.tensors[stored].format)

    def _rows(self, stored: str) -> Tensor:
        """Returns a tensor as it is stored: [num_rows, bytes of a row], uint8. Its memory is the file's."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the memory is read-only, and nothing writes to it
            flat = torch.frombuffer(self._file.stored(stored), dtype=torch.uint8)
        return flat.view(prod(self._file.tensors[stored].shape[:-1]), -1)

    def _in_order(self, rows: Tensor, stored: str) -> Tensor:
        """Returns the rows of a tensor in transformers' order."""
        metadata = self._file.metadata
        keys = HEADS.get(stored.split(".")[-2], ()) if metadata["general.architecture"] == "llama" else ()
        heads = [metadata[key] for key in keys if key in metadata]
        if not heads:
            return rows
        # llama.cpp's Llama rotates neighbours, transformers' the two halves of a head.
        return rows.view(heads[0], -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def stored_name(name: str) -> str:
    """Returns what a tensor of transformers is called in the file."""
    if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name):
        return f"blk.{match[1]}.{IN_LAYERS.get(match[2], match[2])}.{match[3]}"
    return OUTSIDE.get(name, name)


def _transformers_name(stored: str) -> str:
    """The opposite of stored_name(). A name that is not known stays."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", stored)
    if match and match[2] in OF_LAYERS:
        return f"model.layers.{match[1]}.{OF_LAYERS[match[2]]}.{match[3]}"
    return next((name for name, own in OUTSIDE.items() if own == stored), stored)
