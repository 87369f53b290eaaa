"""The decoder on a GPU: computes what decoder.py computes, with Triton kernels and the vendor's matrix products.

With TRITON_INTERPRET=1 the kernels also run on a CPU, slowly. Tests use this where there is no GPU.
"""

import os
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import linear

from trunkline_kernels.gpu import dependent_launch, persistent_linear
from trunkline_kernels.gpu import ragged_attention as ragged
from trunkline_kernels.gpu.decode_attention import decode_attention
from trunkline_kernels.gpu.decode_tiling import HOPPER_SHARED_MEMORY, DecodeTiling, decode_tiling_for
from trunkline_kernels.gpu.device_batch import DeviceBatch
from trunkline_kernels.gpu.device_rows import gather_rows
from trunkline_kernels.gpu.fixed_matmul import fixed_linear, fixed_tilings
from trunkline_kernels.gpu.prompt_attention import FreshPrompts, library_is_chosen, prompt_attention
from trunkline_kernels.gpu.prompt_attention import key_of as prompt_attention_key
from trunkline_kernels.gpu.ragged_attention import (
    RaggedTiling,
    Tiles,
    ragged_attention,
    split_tiles_of,
    tiles_of,
    tiling_for,
)
from trunkline_kernels.gpu.rms_norm import add_rms_norm, rms_norm, rms_norm_in_place
from trunkline_kernels.gpu.rotary_kv import rotary_kv
from trunkline_kernels.gpu.shared_prefix import shared_prefix
from trunkline_kernels.gpu.tuned_tilings import chosen_table
from trunkline_kernels.quantized_weight import KINDS
from trunkline_kernels.ragged_batch import KVLayer
from trunkline_worker.model.architectures.decoder_spec import DecoderSpec
from trunkline_worker.model.checkpoint.refusals import ModelError
from trunkline_worker.model.expert_loads import ExpertLoads
from trunkline_worker.model.gpu_experts import feed_to_experts
from trunkline_worker.model.gpu_weight import GpuWeight, gpu_layers
from trunkline_worker.model.rotary_tables import layer_tables
from trunkline_worker.model.weights import DecoderWeights, ExpertsWeights, StoredLinear, whole_product

MAX_HEAD_DIM = 256
OLDEST_CAPABILITY = (8, 0)
FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True, slots=True)
class Chip:
    """The properties of a device that the choice of kernels depends on."""

    num_multiprocessors: int
    shared_memory: int  # bytes per program
    capability: tuple[int, int]
    name: str = ""  # as torch reports it
    dependent_launches: bool = False  # a kernel may be launched while the one before it ends

    @classmethod
    def of(cls, device: torch.device) -> "Chip":
        """Returns the properties of `device`. Raises ModelError (one line) if the kernels cannot run on it."""
        if device.type != "cuda":
            if os.environ.get("TRITON_INTERPRET") == "1":
                return cls(4, 64 << 10, OLDEST_CAPABILITY)
            raise ModelError("kernels=triton needs an NVIDIA or AMD GPU: use --kernels torch, or auto")
        found = torch.cuda.get_device_properties(device)
        capability = (found.major, found.minor)
        if torch.version.hip is None and capability < OLDEST_CAPABILITY:
            raise ModelError(
                f"{found.name} has compute capability {found.major}.{found.minor}, and the Triton kernels need 8.0: "
                "use --kernels torch"
            )
        shared = getattr(found, "shared_memory_per_block_optin", 0) or found.shared_memory_per_block
        try:
            dependent = dependent_launch.is_offered(capability, is_nvidia=torch.version.hip is None)
        except ValueError as error:
            raise ModelError(str(error)) from None
        return cls(found.multi_processor_count, shared, capability, found.name, dependent)


def check_options(
    spec: DecoderSpec, device: torch.device, *, deterministic: bool, quantization: str, kv_dtype: str
) -> None:
    """Raises ModelError (one line) if the kernels do not support the model, the device or the options."""
    chip = Chip.of(device)
    if spec.head_dim > MAX_HEAD_DIM or spec.head_dim % 2:
        raise ModelError(
            f"head_dim {spec.head_dim} is not supported by the Triton kernels (even, at most {MAX_HEAD_DIM}): "
            "use --kernels torch"
        )
    try:
        chosen_table()
    except ValueError as error:
        raise ModelError(str(error)) from None
    if quantization != "none" and deterministic:
        raise ModelError(
            f"quantization={quantization} cannot be combined with --deterministic: its tiles depend on the batch"
        )
    if device.type == "cuda" and chip.capability < FP8_CAPABILITY:
        if quantization == "fp8":
            raise ModelError("quantization=fp8 needs compute capability 8.9 (L4, H100 or newer): use int8")
        if kv_dtype == "fp8":
            raise ModelError("kv_dtype=fp8 needs compute capability 8.9 (L4, H100 or newer): leave it out")


def kept_kinds(device: torch.device, *, deterministic: bool) -> frozenset[str]:
    """Returns the kinds of quantised weights that the kernels multiply by on this device."""
    if deterministic:
        return frozenset()  # their tiles depend on the batch
    has_fp8 = device.type != "cuda" or Chip.of(device).capability >= FP8_CAPABILITY
    return frozenset(KINDS if has_fp8 else {"int8", "int4"})


class GpuDecoder:
    """Computes hidden states of new tokens, reading and writing the KV pool, and logits of hidden states.

    The caller has run check_options().
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights[StoredLinear],
        *,
        context_length: int,
        deterministic: bool,
        kv_dtype: torch.dtype | None = None,
        chip: Chip | None = None,
    ) -> None:
        """chip: the device that kernels are chosen for; None: the device of the weights"""
        self.spec = spec
        self._scale = spec.attention_scale
        self._device = weights.embedding.device
        self.chip = chip or Chip.of(self._device)
        self._dependent = self.chip.dependent_launches
        # NVIDIA's library can write a product in float32, which avoids rounding it to 16 bits first.
        is_nvidia = torch.version.hip is None
        self._widens = self._device.type != "cpu" and is_nvidia
        self._embedding, self._final_norm, self._head = weights.embedding, weights.final_norm, weights.head.weight
        dtype = self._embedding.dtype
        whole = [layer.with_products(whole_product(each, dtype) for each in layer.products) for layer in weights.layers]
        self._fixed = fixed_tilings(self.chip.capability, is_nvidia=is_nvidia, dtype=dtype) if deterministic else ()
        self._layers = gpu_layers(
            spec.layers, whole, name=self.chip.name, multiprocessors=self.chip.num_multiprocessors,
            device=self._device, fixed=self._fixed, dependent=self._dependent,
            persistent=persistent_linear.is_offered(self.chip.capability, is_nvidia=is_nvidia)
            and self.chip.shared_memory >= HOPPER_SHARED_MEMORY,
        )  # fmt: skip
        # The largest weight that is written as a whole for products of many rows. Those of experts never are.
        whole_at_times = (
            (*layer.products[:2], *layer.products[4:])
            if isinstance(layer.feed_forward, ExpertsWeights)
            else layer.products
            for layer in self._layers
        )
        self.widened_bytes = dtype.itemsize * max(
            (product.widened_elements for products in whole_at_times for product in products), default=0
        )
        self.expert_loads = ExpertLoads(spec, self._device)
        self._tables = layer_tables(spec, context_length, self._device)
        self._windows = spec.windows
        self._group = spec.num_heads // spec.num_kv_heads
        self._tiling: RaggedTiling = tiling_for(
            head_dim=spec.head_dim, group=self._group, dtype=dtype, kv_dtype=kv_dtype or dtype,
            shared_memory=self.chip.shared_memory, split=deterministic, device=self.chip.name,
        )  # fmt: skip
        # Under --deterministic a token's bits must not depend on how its prompt is split into steps.
        self.library_prompts = not deterministic and library_is_chosen(
            prompt_attention_key(
                device=self.chip.name,
                head_dim=spec.head_dim,
                group=self._group,
                dtype=dtype,
                kv_dtype=kv_dtype or dtype,
            ),
            self._device,
        )
        self.tile_seqs = self._tiling.tokens(self._group)  # new tokens per tile, or decodes that share a prefix
        # Under --deterministic all sequences go through one kernel, and contexts are split at fixed positions.
        self.split = ragged.SPLIT if deterministic else 0
        self.decode_tiling: DecodeTiling = decode_tiling_for(
            head_dim=spec.head_dim,
            group=self._group,
            shared_memory=self.chip.shared_memory,
            dtype=dtype,
            kv_dtype=kv_dtype or dtype,
            device=self.chip.name,
        )

    def tiles(self, query_lens: NDArray[np.int32], context_lens: NDArray[np.int32]) -> Tiles:
        """Returns the tiles of the sequences that ragged_attention computes. query_lens, context_lens: [num_seqs]"""
        if self.split:
            return split_tiles_of(query_lens, context_lens, self.tile_seqs, self.split)
        return tiles_of(query_lens, self.tile_seqs)

    def forward(self, batch: DeviceBatch, kv: list[KVLayer], rows: Tensor | None = None) -> Tensor:
        """Returns hidden states before the final norm: [num_rows or num_tokens, hidden]. Writes the tokens' keys and
        values to `kv`.

        rows: [num_rows] int32, the tokens whose states are returned; None: all, including padding
        """
        spec = self.spec
        if len(batch.decode_lens):
            batch.decode_plan.update(batch.decode_lens, batch.prefixes.of_sequence)
        # The zeros come before the embedding: the first norm is a dependent launch and needs a kernel just before it.
        attended = self._embedding.new_zeros(len(batch.token_ids), spec.num_heads, spec.head_dim)
        residual = gather_rows(self._embedding, batch.token_ids)
        if spec.multipliers.embedding != 1:
            residual.mul_(spec.multipliers.embedding)
        delta: Tensor | None = None  # still to be added to the residual stream
        layers = zip(kv, self._layers, self._windows, self._tables, strict=True)
        for number, (pool, layer, window, (cos, sin)) in enumerate(layers, start=1):
            attention, feed_forward = layer.attention, layer.feed_forward
            qkv = attention.qkv.multiply(self._norm(delta, residual, attention.norm))
            across = attention.across_heads(qkv, spec.head_dim)
            for part, weight in across:
                rms_norm_in_place(part, weight, spec.rms_norm_eps, dependent=self._dependent)
            q = rotary_kv(
                qkv, pool, batch.positions, batch.slots, cos, sin, num_heads=spec.num_heads,
                query_norm=None if across else attention.query_norm,
                key_norm=None if across else attention.key_norm, eps=spec.rms_norm_eps,
                keep_keys=batch.fresh is not None, dependent=self._dependent,
            )  # fmt: skip
            self._attend(q, pool, batch, attended, window)
            fresh = batch.fresh
            x = attended if fresh is None else self._attend_fresh(q, qkv, fresh, attended, window)
            x = x.flatten(1)
            if rows is not None and number == len(kv):
                # No later layer reads the other tokens' states.
                x, residual = gather_rows(x, rows), gather_rows(residual, rows)
            delta = self._add(attention.output, x, residual, attention.post_norm)
            x = self._norm(delta, residual, feed_forward.norm)
            if isinstance(feed_forward, ExpertsWeights):
                kv_slots = None if rows is not None and number == len(kv) else batch.slots
                fed = feed_to_experts(
                    feed_forward, x, kv_slots=kv_slots, loads=self.expert_loads.counts[number - 1],
                    shared_memory=self.chip.shared_memory,
                )  # fmt: skip
                delta = self._scaled(fed, feed_forward.post_norm)
            else:
                x = feed_forward.gate_up.multiply_gated(x)
                delta = self._add(feed_forward.down, x, residual, feed_forward.post_norm)
        return residual if delta is None else residual + delta

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns logits [num_rows, vocab] float32. hidden: [num_rows, hidden] as forward() returns it"""
        x = self.final_states(hidden)
        head = self._head
        if self._fixed:
            return fixed_linear(x, head, dtype=torch.float32, tilings=self._fixed)
        if self._widens and x.dtype != torch.float32:
            return torch.mm(x, head.t(), out_dtype=torch.float32)
        return linear(x, head).float()

    def final_states(self, hidden: Tensor) -> Tensor:
        """Returns hidden states after the final norm. hidden: [num_rows, hidden] as forward() returns it"""
        return rms_norm(hidden.contiguous(), self._final_norm, self.spec.rms_norm_eps)

    def _add(self, product: GpuWeight, x: Tensor, residual: Tensor, post_norm: Tensor | None) -> Tensor | None:
        """Adds the result of a layer's part to the residual stream and returns None, or returns what is to be added."""
        if post_norm is None:
            return product.add_to(residual, x, self.spec.multipliers.residual)
        return self._scaled(product.multiply(x), post_norm)

    def _scaled(self, x: Tensor, post_norm: Tensor | None) -> Tensor:
        """Returns what is to be added to the residual stream for the result of a layer's part."""
        if post_norm is not None:
            x = self._norm(None, x, post_norm)
        multiplier = self.spec.multipliers.residual
        return x if multiplier == 1 else x.mul_(multiplier)

    def _norm(self, delta: Tensor | None, residual: Tensor, weight: Tensor | None) -> Tensor:
        """Adds to the residual stream, and returns its norm; without a norm, the residual stream itself."""
        eps = self.spec.rms_norm_eps
        if weight is None:
            return residual if delta is None else residual.add_(delta)
        if delta is None:
            return rms_norm(residual, weight, eps, dependent=self._dependent)
        return add_rms_norm(delta, residual, weight, eps, dependent=self._dependent)

    def _attend(self, q: Tensor, layer: KVLayer, batch: DeviceBatch, out: Tensor, window: int | None) -> None:
        count = len(batch.decode_lens)
        if count:
            shared_prefix(
                q[:count], layer, batch.prefixes, block_tables=batch.block_tables, tiling=self._tiling,
                scale=self._scale,
            )  # fmt: skip
            decode_attention(
                q[:count], layer, out[:count], context_lens=batch.decode_lens, rows=batch.rows[:count],
                block_tables=batch.block_tables, plan=batch.decode_plan, prefixes=batch.prefixes,
                scale=self._scale, window=window, dependent=self._dependent,
            )  # fmt: skip
        ragged_attention(
            q, layer, out, tiles=batch.tiles, query_starts=batch.query_starts, context_lens=batch.context_lens,
            rows=batch.rows, block_tables=batch.block_tables, tiling=self._tiling, scale=self._scale, window=window,
            split=self.split, pieces=batch.pieces,
        )  # fmt: skip

    def _attend_fresh(
        self, q: Tensor, qkv: Tensor, fresh: FreshPrompts, attended: Tensor, window: int | None
    ) -> Tensor:
        """Computes attention of prompts that read nothing from the pool. Returns the result of all tokens.

        qkv: with rotated keys; attended: results of the other tokens
        """
        heads, kv_heads = self.spec.num_heads, self.spec.num_kv_heads
        parts = qkv.view(len(qkv), heads + 2 * kv_heads, self.spec.head_dim)[fresh.rows]
        keys, values = parts[:, heads : heads + kv_heads], parts[:, heads + kv_heads :]
        found = prompt_attention(q[fresh.rows], keys, values, fresh, scale=self._scale, window=window)
        if len(found) == len(q):
            return found
        attended[fresh.rows] = found
        return attended
