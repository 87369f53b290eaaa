"""The matrix products of a layer on a GPU: quantised or not, by the vendor's library or by this project's kernels."""

from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn.functional import linear

from trunkline_kernels.gpu.fixed_matmul import fixed_linear
from trunkline_kernels.gpu.gated_linear import GatedTiling, gated_linear
from trunkline_kernels.gpu.persistent_linear import (
    Factors,
    PersistentTiling,
    ProductRoom,
    add_persistent_linear,
    persistent_gated_linear,
    persistent_linear,
)
from trunkline_kernels.gpu.product_choice import ProductChoice, product_choice
from trunkline_kernels.gpu.quantized_linear import (
    Fp8Tiling,
    QuantizedWeight,
    library_fp8_linear,
    library_takes,
    quantize,
    quantize_rows,
    quantized_linear,
)
from trunkline_kernels.gpu.silu_and_mul import silu_and_mul
from trunkline_kernels.gpu.tuned_tilings import ADDED, GATED, LINEAR
from trunkline_worker.model.checkpoint.refusals import ModelError
from trunkline_worker.model.checkpoint.spec import DecoderSpec
from trunkline_worker.model.decoder import LayerWeights


@dataclass(frozen=True, slots=True)
class Products:
    """A layer's matrices, quantised or not. Embedding and head stay unquantised, because they decide between tokens."""

    qkv: Tensor | QuantizedWeight
    output: Tensor | QuantizedWeight
    gate_up: Tensor | QuantizedWeight
    down: Tensor | QuantizedWeight

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the matrices are stored."""
        return self.qkv.dtype if isinstance(self.qkv, Tensor) else self.qkv.data.dtype

    @classmethod
    def of(cls, layer: LayerWeights, quantization: str) -> "Products":
        """Quantises a layer's matrices. Raises ModelError if their shapes do not allow it."""
        matrices = (layer.qkv, layer.output, layer.gate_up, layer.down)
        if quantization == "none":
            return cls(*matrices)
        try:
            return cls(*(quantize(matrix, quantization) for matrix in matrices))
        except ValueError as error:
            raise ModelError(f"quantization={quantization}: {error}") from None


@dataclass(frozen=True, slots=True)
class QuantizedLayer(LayerWeights):
    """A layer that holds its matrices in quantised form only; the fields of the plain matrices are empty tensors."""

    products: Products


def quantized_layer(layer: LayerWeights, quantization: str) -> LayerWeights:
    """Returns the layer with its matrices quantised and the plain ones dropped; with "none", the layer itself.

    Raises ModelError if the shapes do not allow it.
    """
    if quantization == "none":
        return layer
    values = {field.name: getattr(layer, field.name) for field in fields(layer)}
    nothing = layer.qkv.new_empty(0)
    values |= {name: nothing for name in ("qkv", "output", "gate_up", "down")}
    return QuantizedLayer(**values, products=Products.of(layer, quantization))


@dataclass(frozen=True, slots=True)
class LayerProducts:
    """Computes the matrix products of a model's layers, which all have the same shapes.

    Products with a bias, or with an int8 or int4 weight, ignore the timed choice and always use the same kernel.
    """

    qkv: ProductChoice
    output: ProductChoice
    gate_up: ProductChoice
    down: ProductChoice
    room: ProductRoom
    deterministic: bool
    dependent: bool  # kernels use dependent launches, see dependent_launch

    @classmethod
    def of(
        cls,
        spec: DecoderSpec,
        *,
        dtype: torch.dtype,
        device: torch.device,
        name: str,
        multiprocessors: int,
        deterministic: bool,
        dependent: bool,
    ) -> "LayerProducts":
        """Looks up the timed choices of these shapes. Raises ModelError if an entry of the table of tilings is invalid.

        dtype: of the matrices; name: of the device, as torch reports it
        """
        heads, hidden, intermediate = spec.num_heads * spec.head_dim, spec.hidden_size, spec.intermediate_size
        shapes = (
            (LINEAR, heads + 2 * spec.num_kv_heads * spec.head_dim, hidden),
            (ADDED, hidden, heads),
            (GATED, intermediate, hidden),
            (ADDED, hidden, intermediate),
        )
        # Under --deterministic every product uses one kernel, and timed choices are ignored.
        choices = [ProductChoice()] * len(shapes)
        if not deterministic:
            try:
                choices = [
                    product_choice(kernel, device=name, columns=columns, inner=inner, dtype=dtype)
                    for kernel, columns, inner in shapes
                ]
            except ValueError as error:
                raise ModelError(f"the table of tilings: {error}") from None
        room = ProductRoom.allocate(_persistent(choices), multiprocessors=multiprocessors, device=device)
        qkv, output, gate_up, down = choices
        return cls(qkv, output, gate_up, down, room, deterministic, dependent)

    def before_attention(self, x: Tensor, weight: Tensor | QuantizedWeight, bias: Tensor | None) -> Tensor:
        """Returns queries, keys and values: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]."""
        tiling = self.qkv.tiling(len(x))
        if not isinstance(tiling, PersistentTiling) or bias is not None:
            return self._linear(x, weight, bias, self.qkv)
        left, right, factors = _operands(x, weight, dependent=self.dependent)
        return persistent_linear(
            left, right, tiling, self.room, factors=factors, dtype=x.dtype, dependent=self.dependent
        )

    def gated(self, x: Tensor, weight: Tensor | QuantizedWeight, bias: Tensor | None) -> Tensor:
        """Returns the first half of the feed-forward layer, silu(gate) * up: [num_tokens, intermediate]."""
        tiling = self.gate_up.tiling(len(x))
        if isinstance(tiling, PersistentTiling) and bias is None:
            left, right, factors = _operands(x, weight, dependent=self.dependent)
            return persistent_gated_linear(
                left, right, tiling, self.room, factors=factors, dtype=x.dtype, dependent=self.dependent
            )
        if isinstance(tiling, GatedTiling) and isinstance(weight, Tensor) and bias is None:
            return gated_linear(x, weight, tiling, dependent=self.dependent)
        return silu_and_mul(self._linear(x, weight, bias, self.gate_up), dependent=self.dependent)

    def add_output(
        self, x: Tensor, weight: Tensor | QuantizedWeight, bias: Tensor | None, residual: Tensor
    ) -> Tensor | None:
        """Adds the output projection to `residual` in place and returns None, or returns it for the caller to add.

        The caller has to add it where the chosen kernel cannot. Shapes: [num_tokens, hidden]
        """
        return self._added(x, weight, bias, residual, self.output)

    def add_down(
        self, x: Tensor, weight: Tensor | QuantizedWeight, bias: Tensor | None, residual: Tensor
    ) -> Tensor | None:
        """Adds the second half of the feed-forward layer to `residual`, or returns it, as add_output() does."""
        return self._added(x, weight, bias, residual, self.down)

    def _added(
        self,
        x: Tensor,
        weight: Tensor | QuantizedWeight,
        bias: Tensor | None,
        residual: Tensor,
        choice: ProductChoice,
    ) -> Tensor | None:
        tiling = choice.tiling(len(x))
        if isinstance(tiling, PersistentTiling) and bias is None:
            left, right, factors = _operands(x, weight, dependent=self.dependent)
            add_persistent_linear(left, right, residual, tiling, self.room, factors=factors, dependent=self.dependent)
            return None
        if self.deterministic or bias is not None or isinstance(weight, QuantizedWeight):
            return self._linear(x, weight, bias, choice)
        residual.addmm_(x, weight.t())
        return None

    def _linear(
        self, x: Tensor, weight: Tensor | QuantizedWeight, bias: Tensor | None, choice: ProductChoice
    ) -> Tensor:
        if isinstance(weight, Tensor):
            return fixed_linear(x, weight, bias) if self.deterministic else linear(x, weight, bias)
        if choice.library_won(len(x)) and library_takes(weight) and bias is None:
            return library_fp8_linear(x, weight, dependent=self.dependent)
        tiling = choice.tiling(len(x))
        own = tiling if isinstance(tiling, Fp8Tiling) else None
        return quantized_linear(x, weight, bias, own, dependent=self.dependent)


def _operands(x: Tensor, weight: Tensor | QuantizedWeight, *, dependent: bool) -> tuple[Tensor, Tensor, Factors | None]:
    """Returns the operands of a persistent kernel. With an fp8 weight, x is rounded to 8 bits too."""
    if isinstance(weight, Tensor):
        return x, weight, None
    narrow, scale = quantize_rows(x, dependent=dependent)
    return narrow, weight.data, Factors(scale, weight.scale)


def _persistent(choices: Iterable[ProductChoice]) -> list[PersistentTiling]:
    return [tiling for choice in choices for tiling in choice.tilings if isinstance(tiling, PersistentTiling)]
