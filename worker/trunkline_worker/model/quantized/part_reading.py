"""Reads the parts of products from a checkpoint whose config.json says how they are quantised."""

from collections.abc import Set

import torch
from torch import Tensor

from trunkline_kernels.quantized_weight import QuantizedWeight, dequantize
from trunkline_worker.model.checkpoint.checkpoint import Checkpoint
from trunkline_worker.model.quantized.stored_part import StoredPart, StoredSchemes

OF_KV = (".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".k_zero_point", ".v_zero_point")


class PartReader:
    """Reads parts as weight_reading.ReadPart.

    kept: kinds of QuantizedWeight that the device multiplies by; others are dequantised
    keeps_blocks: whether it multiplies by the forms that only CPUs have kernels for, such as blocks of GGUF files
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        schemes: StoredSchemes | None,
        *,
        kept: Set[str],
        keeps_blocks: bool,
        dtype: torch.dtype,
    ) -> None:
        self._checkpoint = checkpoint
        self._schemes = schemes
        self._kept = kept
        self._keeps_blocks = keeps_blocks
        self._dtype = dtype
        if schemes is not None and schemes.quantizes_kv:
            checkpoint.skip_all(OF_KV)

    def __call__(self, name: str, rows: int, inner: int, device: torch.device) -> QuantizedWeight | Tensor | None:
        scheme = None if self._schemes is None else self._schemes.scheme_of(name)
        if scheme is None:
            return self._checkpoint.quantized(name, rows, inner, device) if self._keeps_blocks else None
        stored = scheme.read(StoredPart(self._checkpoint, name, rows, inner, device))
        if isinstance(stored, QuantizedWeight) and self._is_kept(stored):
            if not stored.scale.is_meta:  # exponents are integers, and float64 may be past float32
                self._checkpoint.see(stored.scale, f"{name}.{scheme.main}")
            return stored
        values = (dequantize(stored) if isinstance(stored, QuantizedWeight) else stored).to(self._dtype)
        if not values.is_meta:
            self._checkpoint.see(values, f"{name}.{scheme.main}")
        return values

    def _is_kept(self, weight: QuantizedWeight) -> bool:
        return weight.kind in self._kept and (self._keeps_blocks or not weight.for_cpus)
