"""The formats of quantised weights: random tensors in each, and what they stand for by code that is not ours."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Stored = dict[str, Tensor]  # the tensors of a part, without its name
SCALE = 0.01  # of weights, so that logits are about 1


@dataclass(frozen=True)
class StoredFormat:
    """store: draws the tensors of a part [rows, inner]; values: what they stand for"""

    config: dict[str, Any]
    store: Callable[[int, int, torch.Generator], Stored]
    values: Callable[[Stored], Tensor]


def random_scales(shape: tuple[int, ...], draw: torch.Generator, most: float) -> Tensor:
    """Scales with which values of at most `most` are of the size of weights."""
    return (torch.rand(shape, generator=draw) + 0.5) * (SCALE / most * 5)


def random_bits(shape: tuple[int, ...], draw: torch.Generator) -> Tensor:
    """Words of which every bit is random."""
    return torch.randint(-(1 << 31), 1 << 31, shape, generator=draw).to(torch.int32)


def random_fp8(rows: int, inner: int, draw: torch.Generator) -> Tensor:
    bits = torch.randint(0, 256, (rows, inner), dtype=torch.uint8, generator=draw)
    return torch.where(bits & 127 == 127, 0, bits).view(torch.float8_e4m3fn)


def fp8(shape: Callable[[int, int], tuple[int, ...]], scale_name: str, **config: Any) -> StoredFormat:
    """By transformers' own dequantisation."""

    def store(rows: int, inner: int, draw: torch.Generator) -> Stored:
        scale = random_scales(shape(rows, inner), draw, 448)
        return {"weight": random_fp8(rows, inner, draw), scale_name: scale, "input_scale": torch.tensor(0.5)}

    def values(stored: Stored) -> Tensor:
        from transformers.integrations import finegrained_fp8

        operation: Any = finegrained_fp8.Fp8Dequantize
        scale = stored[scale_name]
        found: Tensor = operation(None).convert({"weight": stored["weight"], "weight_scale_inv": scale})["weight"]
        return found.float()

    return StoredFormat({"quant_method": "fp8", "activation_scheme": "static", **config}, store, values)


def exponents(stored: StoredFormat) -> StoredFormat:
    """The same with scales that are powers of two, as DeepSeek V3.1 and later store them."""

    def store(rows: int, inner: int, draw: torch.Generator) -> Stored:
        tensors = stored.store(rows, inner, draw)
        name = next(name for name in tensors if "scale_inv" in name)
        return tensors | {name: tensors[name].to(torch.float8_e8m0fnu)}

    return StoredFormat(stored.config | {"scale_fmt": "ue8m0"}, store, stored.values)


def compressed(form: str, **weights: Any) -> StoredFormat:
    """Written and read by the package compressed-tensors; it computes in the dtype of the scales."""
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False, **weights}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}

    def call(name: str, tensors: Stored) -> Stored:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationScheme

        compressor: Any = BaseCompressor.get_value_from_registry(form)
        made: Stored = getattr(compressor, name)(tensors, QuantizationScheme(**group))
        return made

    def store(rows: int, inner: int, draw: torch.Generator) -> Stored:
        most = {"int": 1 << (weights["num_bits"] - 1), "float": 448 if weights["num_bits"] == 8 else 6}[weights["type"]]
        block = weights.get("block_structure") or [1, weights.get("group_size") or inner]
        shape = (1,) if weights["strategy"] == "tensor" else (-(-rows // block[0]), -(-inner // block[1]))
        scale = random_scales(shape, draw, most)
        if form.startswith("mx"):
            scale = scale.log2().floor().exp2()
        tensors = {"weight": torch.randn(rows, inner, generator=draw) * SCALE * 3, "weight_scale": scale}
        if not weights["symmetric"]:
            tensors["weight_zero_point"] = torch.randint(-most // 4, most // 4, shape, generator=draw, dtype=torch.int8)
        return call("compress", tensors)

    def values(stored: Stored) -> Tensor:
        if stored["weight_scale"].dtype != torch.uint8:
            stored = stored | {"weight_scale": stored["weight_scale"].float()}
        return call("decompress", stored)["weight"].float()

    config = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}
    return StoredFormat(config | {"ignore": ["lm_head"], "config_groups": {"group_0": group}}, store, values)


def awq(group: int, **config: Any) -> StoredFormat:
    """By the converter of compressed-tensors."""
    settings = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm", **config}

    def store(rows: int, inner: int, draw: torch.Generator) -> Stored:
        groups = 1 if group == -1 else inner // group
        return {
            "qweight": random_bits((inner, rows // 8), draw),
            "qzeros": random_bits((groups, rows // 8), draw),
            "scales": random_scales((groups, rows), draw, 8),
        }

    def values(stored: Stored) -> Tensor:
        from compressed_tensors.entrypoints.convert import AutoAWQConverter

        inner, size = len(stored["qweight"]), len(stored["qweight"]) // len(stored["scales"])
        converter: Any = AutoAWQConverter.from_autoawq_config(settings | {"group_size": size})
        converted = converter.process({f"layer.{name}": tensor for name, tensor in stored.items()})
        read = compressed("pack-quantized", num_bits=4, strategy="group", group_size=size, symmetric=False)
        assert converted["layer.weight_shape"].tolist()[1] == inner
        return read.values({name.removeprefix("layer."): tensor for name, tensor in converted.items()})

    return StoredFormat(settings, store, values)


def gptq(group: int, bits: int = 4, **config: Any) -> StoredFormat:
    """By a reader of single integers, written from the description of the format."""
    settings = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": False, **config}
    ones = 0x11111111 if bits == 4 else 0x01010101

    def zeros_of(groups: int, words: int, draw: torch.Generator) -> Tensor:
        middle = ones * ((1 << (bits - 1)) - 1)
        return (
            torch.full((groups, words), middle, dtype=torch.int32)
            if config.get("sym")
            else random_bits((groups, words), draw)
        )

    def store(rows: int, inner: int, draw: torch.Generator) -> Stored:
        groups = 1 if group == -1 else -(-inner // group)
        return {
            "qweight": random_bits((inner * bits // 32, rows), draw),
            "qzeros": zeros_of(groups, rows * bits // 32, draw),
            "scales": random_scales((groups, rows), draw, 1 << (bits - 1)),
            "g_idx": torch.arange(inner, dtype=torch.int32) // (inner if group == -1 else group),
            "bias": torch.zeros(rows),
        }

    def values(stored: Stored) -> Tensor:
        words, zeros, scales = (stored[name] for name in ("qweight", "qzeros", "scales"))
        if config.get("checkpoint_format") != "gptq_v2":
            zeros = zeros + ones
        places = torch.arange(0, 32, bits, dtype=torch.int32)
        integers = (words[:, None, :] >> places[:, None]) & ((1 << bits) - 1)  # [words, place, rows]
        integers = integers.reshape(-1, words.shape[1])
        of_groups = ((zeros[:, :, None] >> places) & ((1 << bits) - 1)).reshape(len(zeros), -1)
        groups = stored["g_idx"].long()
        return ((integers - of_groups[groups]) * scales[groups]).t()

    return StoredFormat(settings, store, values)


def mxfp4() -> StoredFormat:
    """By transformers' own dequantisation."""

    def store(rows: int, inner: int, draw: torch.Generator) -> Stored:
        return {
            "weight_blocks": torch.randint(0, 256, (rows, inner // 32, 16), dtype=torch.uint8, generator=draw),
            "weight_scales": torch.randint(117, 121, (rows, inner // 32), dtype=torch.uint8, generator=draw),
        }

    def values(stored: Stored) -> Tensor:
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        unpack: Any = convert_moe_packed_tensors
        found: Tensor = unpack(stored["weight_blocks"][None], stored["weight_scales"][None], dtype=torch.float32)
        return found[0].t()

    return StoredFormat({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, store, values)


BLOCKS = fp8(lambda r, i: (r // 32, i // 64), "weight_scale_inv", weight_block_size=[32, 64], fmt="e4m3")
FORMATS: dict[str, StoredFormat] = {
    "fp8-blocks": BLOCKS,
    "fp8-exponents": exponents(BLOCKS),
    "fp8-tensor": fp8(lambda r, i: (), "weight_scale", ignored_layers=["lm_head"]),
    "fp8-tensor-inv": fp8(lambda r, i: (), "weight_scale_inv", weight_block_size=None),
    "fp8-channel": fp8(lambda r, i: (r, 1), "weight_scale"),
    "fbgemm-fp8": fp8(lambda r, i: (r, 1), "weight_scale", quant_method="fbgemm_fp8", activation_scale_ub=1200.0),
    "float-tensor": compressed("float-quantized", type="float", strategy="tensor"),
    "float-channel": compressed("float-quantized", type="float", strategy="channel"),
    "float-blocks": compressed("naive-quantized", type="float", strategy="block", block_structure=[48, 80]),
    "float-blocks-128": compressed("float-quantized", type="float", strategy="block", block_structure=[128, 128]),
    "int8-tensor": compressed("int-quantized", strategy="tensor"),
    "int8-channel": compressed("int-quantized", strategy="channel"),
    "int8-channel-zeros": compressed("int-quantized", strategy="channel", symmetric=False),
    "int8-groups": compressed("naive-quantized", strategy="group", group_size=32),
    "packed4-groups": compressed("pack-quantized", num_bits=4, strategy="group", group_size=32),
    "packed4-zeros": compressed("pack-quantized", num_bits=4, strategy="group", group_size=64, symmetric=False),
    "packed4-channel": compressed("pack-quantized", num_bits=4, strategy="channel"),
    "packed8-groups": compressed("pack-quantized", strategy="group", group_size=32),
    "packed8-channel": compressed("pack-quantized", strategy="channel"),
    "compressed-mxfp4": compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
    "compressed-mxfp8": compressed("mxfp8-quantized", type="float", strategy="group", group_size=32),
    "awq": awq(64),
    "awq-rows": awq(-1),
    "gptq": gptq(32),
    "gptq-rows": gptq(-1),
    "gptq-odd-groups": gptq(48),
    "gptq-v2": gptq(64, checkpoint_format="gptq_v2"),
    "gptq-symmetric": gptq(64, sym=True),
    "gptq-8": gptq(64, bits=8),
    "gptq-8-symmetric": gptq(64, bits=8, sym=True),
    "mxfp4": mxfp4(),
}
