"""Reads from config.json how a checkpoint's weights are quantised. What is not supported is refused by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trunkline_worker.model.checkpoint.entries import Entries, listed, without
from trunkline_worker.model.checkpoint.model_file import read_json
from trunkline_worker.model.checkpoint.refusals import ModelError, shown
from trunkline_worker.model.quantized.fp8_scheme import Fp8Scheme
from trunkline_worker.model.quantized.module_names import check_known, names, skipped
from trunkline_worker.model.quantized.stored_part import Scheme

KEYS = ("quantization_config", "compression_config")  # the second one is older
MLX = "quantization"
WAY_OUT = (
    "serve the unquantised checkpoint; --quantization int8, int4 or, on a GPU, fp8 quantises it while it is loaded"
)
MOST_BLOCK = 1 << 16
FP8_KEYS = ("quant_method", "activation_scheme", "fmt", "weight_block_size", "modules_to_not_convert", "ignored_layers",
            "scale_fmt", "dequantize", "expert_dtype")  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredSchemes:
    """How each part of a model's products is stored."""

    method: str
    scheme_of: Callable[[str], Scheme | None]  # None: not quantised


def read_schemes(directory: Path, ignored_keys: tuple[str, ...] = ()) -> StoredSchemes | None:
    """Returns the schemes of a Hugging Face directory; None if nothing is quantised. Raises ModelError with the file
    and the key that is not supported."""
    path = directory / "config.json"
    try:
        return parse_schemes(without(read_json(path), ignored_keys))
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


def parse_schemes(config: Mapping[str, Any]) -> StoredSchemes | None:
    """Returns the schemes that a config.json describes."""
    given = [key for key in (MLX, *KEYS) if config.get(key) not in (None, {})]
    if not given:
        return None
    if given[0] == MLX:
        raise _unsupported(MLX, "MLX")
    if len(given) > 1:
        raise ModelError(f"both {listed(given)} are given")
    entries = Entries({given[0]: config[given[0]]}).object(given[0])
    method = entries.values.get("quant_method", entries.values.get("quant_algo"))
    if not isinstance(method, str) or method not in METHODS:
        raise _unsupported(given[0], method)
    return StoredSchemes(method, METHODS[method](entries))


def _unsupported(key: str, method: Any) -> ModelError:
    return ModelError(
        f"{key}: the weights are quantised by {shown(method)}, which is not supported; supported: {listed(METHODS)}: "
        + WAY_OUT
    )


def _fp8_schemes(config: Entries) -> Callable[[str], Scheme | None]:
    """The method of DeepSeek, Qwen, transformers and AutoFP8."""
    check_known(config, FP8_KEYS)
    if config.has("fmt"):
        config.one_of("fmt", config.text("fmt"), ("e4m3", "float8_e4m3fn"))
    if config.has("scale_fmt"):  # the dtype of the scales says it, too
        config.one_of("scale_fmt", config.text("scale_fmt"), ("float", "ue8m0"))
    block: tuple[int, int] | None = None
    if config.has("weight_block_size"):
        block = read_block(config, "weight_block_size")
    is_skipped, scheme = skipped(names(config, "modules_to_not_convert", "ignored_layers")), Fp8Scheme(block)
    return lambda name: None if is_skipped(name) else scheme


def read_block(config: Entries, key: str) -> tuple[int, int]:
    """Returns the rows and the inner elements of a block."""
    value = config.values[key]
    whole = isinstance(value, list) and len(value) == 2 and all(type(size) is int for size in value)
    if not whole or not all(1 <= size <= MOST_BLOCK for size in value):
        raise config.refused(key, value, f"a list of 2 integers in [1, {MOST_BLOCK}]")
    return value[0], value[1]


METHODS: dict[str, Callable[[Entries], Callable[[str], Scheme | None]]] = {"fp8": _fp8_schemes}
