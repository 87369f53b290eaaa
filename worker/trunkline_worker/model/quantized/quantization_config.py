"""Reads from config.json how a checkpoint's weights are quantised. What is not supported is refused by name."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trunkline_worker.model.checkpoint.entries import Entries, listed, without
from trunkline_worker.model.checkpoint.model_file import read_json
from trunkline_worker.model.checkpoint.refusals import ModelError, shown
from trunkline_worker.model.quantized.awq_format import awq
from trunkline_worker.model.quantized.compressed_tensors_format import compressed_tensors
from trunkline_worker.model.quantized.fp8_format import fp8
from trunkline_worker.model.quantized.gptq_format import gptq
from trunkline_worker.model.quantized.mxfp4_format import mxfp4
from trunkline_worker.model.quantized.stored_part import StoredSchemes

KEYS = ("quantization_config", "compression_config")  # the second one is older
MLX = "quantization"
METHODS: dict[str, Callable[[Entries], StoredSchemes]] = {
    "awq": awq,
    "compressed-tensors": compressed_tensors,
    "fbgemm_fp8": fp8,
    "fp8": fp8,
    "gptq": gptq,
    "mxfp4": mxfp4,
}
WAY_OUT = (
    "serve the unquantised checkpoint; --quantization int8, int4 or, on a GPU, fp8 quantises it while it is loaded"
)


def read_schemes(directory: Path, ignored_keys: tuple[str, ...] = ()) -> StoredSchemes | None:
    """Returns how the weights of a Hugging Face directory are stored; None: nothing is quantised. Raises ModelError
    with the file and the key that is not supported."""
    path = directory / "config.json"
    try:
        return parse_schemes(without(read_json(path), ignored_keys))
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


def parse_schemes(config: Mapping[str, Any]) -> StoredSchemes | None:
    """Returns how the weights of a checkpoint with this config.json are stored."""
    given = [key for key in (MLX, *KEYS) if config.get(key) not in (None, {})]
    if not given:
        return None
    if given[0] == MLX:
        raise _unsupported(MLX, "MLX")
    if len(given) > 1:
        raise ModelError(f"both {listed(given)} are given")
    entries = Entries({given[0]: config[given[0]]}).object(given[0])
    method = entries.values.get("quant_method")
    if method in (None, "modelopt"):
        method = entries.values.get("quant_algo", method)
    if method is None and "config_groups" in entries.values:
        method = "compressed-tensors"  # older versions of it name no method
    if not isinstance(method, str) or method not in METHODS:
        raise _unsupported(given[0], method)
    try:
        return METHODS[method](entries)
    except ModelError as error:
        raise ModelError(f"{error}; or {WAY_OUT}") from None


def _unsupported(key: str, method: Any) -> ModelError:
    return ModelError(
        f"{key}: the weights are quantised by {shown(method)}, which is not supported; supported: {listed(METHODS)}: "
        + WAY_OUT
    )
