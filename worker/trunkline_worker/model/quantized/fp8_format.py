"""Weights as 8-bit floats with one scale, or a scale per row or block.

Written by DeepSeek and Qwen (blocks, "weight_scale_inv"), transformers, AutoFP8, FBGEMM and compressed-tensors. Despite
its name, weight_scale_inv is what stored values are multiplied by.
"""

from dataclasses import dataclass

from torch import Tensor

from trunkline_kernels.quantized_weight import BLOCK, QuantizedWeight
from trunkline_worker.model.checkpoint.entries import Entries
from trunkline_worker.model.quantized.module_names import skipped
from trunkline_worker.model.quantized.scheme_entries import check_known, names, read_block
from trunkline_worker.model.quantized.stored_part import (
    BYTES_OF_EXPONENTS,
    FLOATS,
    StoredPart,
    StoredSchemes,
    powers_of_two,
    spread,
)

SCALES = ("weight_scale_inv", "weight_scale")
OF_ACTIVATIONS = ("input_scale", "activation_scale", "input_scale_ub")
KEYS = ("quant_method", "activation_scheme", "fmt", "weight_block_size", "modules_to_not_convert", "ignored_layers",
        "scale_fmt", "dequantize", "expert_dtype", "activation_scale_ub", "kv_cache_scheme")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """block: rows and inner elements that share a scale; None: a row or the whole weight does"""

    block: tuple[int, int] | None
    main: str = "weight"

    def read(self, part: StoredPart) -> QuantizedWeight | Tensor:
        part.skip(OF_ACTIVATIONS)
        rows, inner = part.rows, part.inner
        values = part.tensor(self.main, [rows, inner], dtypes=["F8_E4M3"])
        scale_name = next(filter(part.has, SCALES), SCALES[0])
        if self.block is None:
            scale = part.tensor(scale_name, [], [1], [rows], [rows, 1], dtypes=FLOATS).float()
            return QuantizedWeight("fp8", values, scale.reshape(-1).expand(rows).contiguous(), inner)
        grid = [-(-size // block) for size, block in zip((rows, inner), self.block, strict=True)]
        scale = part.tensor(scale_name, grid, dtypes=(*FLOATS, *BYTES_OF_EXPONENTS))
        scale = scale.float() if scale.itemsize > 1 else powers_of_two(scale)
        if self.block == (BLOCK, BLOCK):
            return QuantizedWeight("fp8", values, scale, inner)
        return values.float() * spread(scale, self.block, rows, inner)


def fp8(config: Entries) -> StoredSchemes:
    """The methods "fp8", of DeepSeek, Qwen, transformers and AutoFP8, and "fbgemm_fp8"."""
    check_known(config, KEYS)
    if config.has("fmt"):
        config.one_of("fmt", config.text("fmt"), ("e4m3", "float8_e4m3fn"))
    block = read_block(config, "weight_block_size") if config.has("weight_block_size") else None
    is_skipped, scheme = skipped(names(config, "modules_to_not_convert", "ignored_layers")), Fp8Scheme(block)
    return StoredSchemes(
        config.text("quant_method"),
        lambda name: None if is_skipped(name) else scheme,
        quantizes_activations=True,
        quantizes_kv=config.has("kv_cache_scheme"),
    )
