"""Weights on a GPU: quantised or not, multiplied by the vendor's library or by this project's kernels."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor
from torch.nn.functional import linear

from trunkline_kernels.gpu.fixed_matmul import fixed_linear
from trunkline_kernels.gpu.matmul_tiling import MatmulTiling
from trunkline_kernels.gpu.persistent_linear import (
    PersistentTiling,
    ProductRoom,
    add_persistent_linear,
    persistent_gated_linear,
    persistent_linear,
)
from trunkline_kernels.gpu.product_choice import ProductChoice, product_choice, untimed_choice
from trunkline_kernels.gpu.quantized_linear import Fp8Tiling, library_fp8_linear, library_takes, quantized_linear
from trunkline_kernels.gpu.silu_and_mul import silu_and_mul
from trunkline_kernels.gpu.tuned_tilings import ADDED, GATED, LINEAR
from trunkline_kernels.gpu.widening import widened
from trunkline_kernels.quantized_weight import QuantizedWeight
from trunkline_worker.model.architectures.decoder_spec import GatedSpec, LayerSpec
from trunkline_worker.model.checkpoint.refusals import ModelError
from trunkline_worker.model.weights import LayerWeights, Linear, StoredPart

# From so many rows on, int8 and int4 weights are written in the dtype of activations and multiplied by the library: the
# tensor cores take longer than that, and our own kernel converts a weight again for each tile of rows.
WIDENED_ROWS = 256


@dataclass(frozen=True, slots=True)
class GpuWeight:
    """A weight of a layer, with the timed choice of kernels for its shape and for what is done with the result."""

    weight: Tensor | QuantizedWeight
    bias: Tensor | None
    choice: ProductChoice  # empty unless the weight is fp8 and has no bias
    room: ProductRoom
    fixed: tuple[MatmulTiling, ...]  # of fixed_tilings(); empty: sums may be added in any order
    dependent: bool  # kernels use dependent launches, see dependent_launch

    def multiply(self, x: Tensor) -> Tensor:
        """[num_rows, in] → [num_rows, out]"""
        if (persistent := self._persistent(x)) is not None:
            return persistent_linear(x, *persistent, self.room, dependent=self.dependent)
        return self._linear(x)

    def multiply_gated(self, x: Tensor) -> Tensor:
        """Returns silu(gate) * up of a weight that holds both: [num_rows, out / 2]."""
        if (persistent := self._persistent(x)) is not None:
            return persistent_gated_linear(x, *persistent, self.room, dependent=self.dependent)
        return silu_and_mul(self._linear(x), dependent=self.dependent)

    def add_to(self, residual: Tensor, x: Tensor, multiplier: float = 1.0) -> Tensor | None:
        """Adds the product times the multiplier to `residual` and returns None, or returns it for the caller to add.

        The caller has to add it where the chosen kernel cannot. residual: [num_rows, out]
        """
        if multiplier == 1 and (persistent := self._persistent(x)) is not None:
            add_persistent_linear(x, *persistent, self.room, out=residual, dependent=self.dependent)
            return None
        if self.fixed or self.bias is not None or isinstance(self.weight, QuantizedWeight):
            added = self._linear(x)
            return added if multiplier == 1 else added.mul_(multiplier)
        residual.addmm_(x, self.weight.t(), alpha=multiplier)
        return None

    @property
    def widened_elements(self) -> int:
        """Elements of the weight if products of many rows write it in the dtype of activations, else 0."""
        weight = self.weight
        return 0 if isinstance(weight, Tensor) or weight.kind == "fp8" else len(weight.data) * weight.inner

    def _linear(self, x: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if isinstance(weight, Tensor):
            return fixed_linear(x, weight, bias, tilings=self.fixed) if self.fixed else linear(x, weight, bias)
        if self.widened_elements and len(x) >= WIDENED_ROWS:
            return linear(x, widened(weight, x.dtype), bias)
        if self.choice.library_won(len(x)) and library_takes(weight):
            return library_fp8_linear(x, weight, dependent=self.dependent)
        tiling = self.choice.tiling(len(x))
        own = tiling if isinstance(tiling, Fp8Tiling) else None
        return quantized_linear(x, weight, bias, own, dependent=self.dependent)

    def _persistent(self, x: Tensor) -> tuple[QuantizedWeight, PersistentTiling] | None:
        """Returns the weight and the tiling of the persistent kernel if it was the fastest for this number of rows."""
        weight, tiling = self.weight, self.choice.tiling(len(x))
        if isinstance(weight, QuantizedWeight) and isinstance(tiling, PersistentTiling):
            return weight, tiling
        return None


def timed_products(layer: LayerSpec) -> list[tuple[str, int, int]]:
    """Returns the kind, the columns of the result and the inner size of each product, as the product sweep times it, in
    the order of LayerSpec.products. Those of experts, also of a shared one, are not timed."""
    attention, feed_forward = layer.attention, layer.feed_forward
    kinds = [LINEAR, ADDED if attention.post_norm is None else LINEAR]
    if isinstance(feed_forward, GatedSpec):
        kinds += [GATED, ADDED if feed_forward.post_norm is None else LINEAR]
    return [
        (kind, product.columns // 2 if kind == GATED else product.columns, product.inner)
        for kind, product in zip(kinds, layer.products, strict=False)
    ]


def gpu_layers(
    specs: Sequence[LayerSpec],
    layers: Sequence[LayerWeights[StoredPart]],
    *,
    name: str,
    multiprocessors: int,
    device: torch.device,
    fixed: tuple[MatmulTiling, ...],
    dependent: bool,
    persistent: bool,
) -> list[LayerWeights[GpuWeight]]:
    """Looks up the timed choices of the layers' products. Raises ModelError if an entry of the table of tilings is
    invalid.

    name: of the device, as torch reports it; fixed: as GpuWeight has them; persistent: it has persistent kernels
    """
    found: dict[tuple[tuple[str, int, int], bool], ProductChoice] = {}

    def choice(timed: tuple[str, int, int] | None, product: StoredPart) -> ProductChoice:
        if timed is None or isinstance(product, Linear) or product.weight.kind != "fp8" or product.bias is not None:
            return ProductChoice()
        (kind, columns, inner), in_blocks = timed, product.weight.in_blocks
        if (timed, in_blocks) not in found:
            try:
                known = product_choice(kind, device=name, columns=columns, inner=inner, in_blocks=in_blocks)
            except ValueError as error:
                raise ModelError(f"the table of tilings: {error}") from None
            if persistent and not known.rows:
                known = untimed_choice(
                    kind, columns=columns, inner=inner, in_blocks=in_blocks, library=library_takes(product.weight)
                )
            found[timed, in_blocks] = known
        return found[timed, in_blocks]

    choices = [
        [choice(*each) for each in zip_longest(timed_products(spec), layer.products)]
        for spec, layer in zip(specs, layers, strict=True)
    ]
    tilings = [tiling for each in found.values() for tiling in each.tilings if isinstance(tiling, PersistentTiling)]
    room = ProductRoom.allocate(tilings, multiprocessors=multiprocessors, device=device)
    return [
        layer.with_products(
            GpuWeight(product.weight, product.bias, chosen, room, fixed, dependent)
            for product, chosen in zip(layer.products, of_layer, strict=True)
        )
        for layer, of_layer in zip(layers, choices, strict=True)
    ]
