"""Every kernel launcher with the arguments of an 8B model, on meta tensors."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from trunkline_bench.kernels.device import H200
from trunkline_bench.kernels.launches import META, Chip
from trunkline_kernels.gpu import device_rows, expert_choice, logit_changes, logprobs, rms_norm, sampling, silu_and_mul
from trunkline_kernels.gpu.decode_attention import decode_attention
from trunkline_kernels.gpu.decode_plan import DecodePlan
from trunkline_kernels.gpu.decode_tiling import DecodeTiling, decode_tiling_for
from trunkline_kernels.gpu.expert_products import ExpertWeight, expert_tilings, multiply_experts
from trunkline_kernels.gpu.fixed_matmul import fixed_linear, fixed_tilings
from trunkline_kernels.gpu.persistent_linear import PersistentTiling, ProductRoom, is_offered
from trunkline_kernels.gpu.product_choice import ProductChoice, untimed_choice
from trunkline_kernels.gpu.quantized_linear import quantized_linear
from trunkline_kernels.gpu.ragged_attention import SPLIT, Pieces, RaggedTiling, ragged_attention, tiling_for
from trunkline_kernels.gpu.rotary_kv import rotary_kv
from trunkline_kernels.gpu.shared_prefix import PrefixRoom, SharedPrefixes, shared_prefix
from trunkline_kernels.gpu.text_attention import text_attention
from trunkline_kernels.gpu.tuned_tilings import ADDED, GATED, PRODUCTS
from trunkline_kernels.gpu.widening import widened
from trunkline_kernels.quantized_weight import FP8, QuantizedWeight, quantize, quantize_blocks
from trunkline_kernels.ragged_batch import KVLayer
from trunkline_kernels.routing_rule import RoutingRule
from trunkline_kernels.token_masks import RowMasks
from trunkline_worker.model.gpu_weight import GpuWeight

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE, VOCAB = 32, 8, 128, 4096, 12288, 151936
# Qwen3-30B-A3B's
EXPERTS, TOP_EXPERTS, EXPERT_HIDDEN, EXPERT_INTERMEDIATE = 128, 8, 2048, 768
IN_BLOCKS = "fp8 in blocks"
SMALL_GROUPS = "int4 in groups of 32 with zero points"  # as checkpoints may have it


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel launcher with the arguments of an 8B model."""

    name: str
    run: Callable[[Chip], object]
    hot: bool = True  # must not spill
    products: bool = False  # must use tensor cores
    fp8: bool = False  # only for chips with fp8


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def pool(dtype: torch.dtype = torch.bfloat16) -> KVLayer:
    scale = empty(1, dtype=torch.float32) if dtype == torch.float8_e4m3fn else None
    shape = (1024, 16, KV_HEADS, HEAD_DIM)
    return KVLayer(empty(*shape, dtype=dtype), empty(*shape, dtype=dtype), scale, scale)


def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return empty(*shape, dtype=dtype)


def ragged(
    chip: Chip,
    *,
    kv_dtype: torch.dtype = torch.bfloat16,
    window: int | None = None,
    split: int = 0,
) -> None:
    tiling = ragged_tiling(chip, kv_dtype, split=bool(split))
    q = empty(512, HEADS, HEAD_DIM)
    pieces = Pieces.allocate(64, HEADS, HEAD_DIM, ints(8, 3)) if split else None
    ragged_attention(
        q, pool(kv_dtype), q, tiles=ints(16, 4), query_starts=ints(9), context_lens=ints(8), rows=ints(8),
        block_tables=ints(64, 128), tiling=tiling, scale=0.1, window=window, split=split, pieces=pieces,
    )  # fmt: skip


def ragged_tiling(chip: Chip, kv_dtype: torch.dtype, *, split: bool = False) -> RaggedTiling:
    return tiling_for(
        head_dim=HEAD_DIM,
        group=HEADS // KV_HEADS,
        dtype=torch.bfloat16,
        kv_dtype=kv_dtype,
        shared_memory=chip.shared_memory,
        split=split,
    )


def decode(chip: Chip, *, kv_dtype: torch.dtype = torch.bfloat16, window: int | None = None) -> None:
    """Decode attention with and without shared prefixes."""
    q = empty(64, HEADS, HEAD_DIM)
    plan = DecodePlan.allocate(
        max_seqs=64, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, num_multiprocessors=132,
        tiling=decode_tiling(chip, kv_dtype), device=META, windows=[window],
    )  # fmt: skip
    tiling = ragged_tiling(chip, kv_dtype)
    room = PrefixRoom.allocate(
        num_tiles=64, tile_seqs=tiling.tokens(HEADS // KV_HEADS), num_heads=HEADS, head_dim=HEAD_DIM, device=META
    )
    prefixes = SharedPrefixes(ints(64, 5), ints(64, 3), room)
    plan.update(ints(64), prefixes.of_sequence)
    shared_prefix(q, pool(kv_dtype), prefixes, block_tables=ints(64, 128), tiling=tiling, scale=0.1)
    for some in (prefixes, SharedPrefixes(ints(0, 5), ints(64, 3), room)):
        decode_attention(
            q, pool(kv_dtype), q, context_lens=ints(64), rows=ints(64), block_tables=ints(64, 128), plan=plan,
            prefixes=some, scale=0.1, window=window, dependent=chip.dependent,
        )  # fmt: skip


def decode_tiling(chip: Chip, kv_dtype: torch.dtype) -> DecodeTiling:
    return decode_tiling_for(
        head_dim=HEAD_DIM,
        group=HEADS // KV_HEADS,
        shared_memory=chip.shared_memory,
        dtype=torch.bfloat16,
        kv_dtype=kv_dtype,
    )


def inputs(chip: Chip) -> None:
    rows = device_rows.DeviceRows.allocate(num_rows=64, max_tokens=4096, max_blocks=256, device=META)
    device_rows.write_segments(rows.tokens, ints(8, 4), ints(4096), 4096)
    index = ints(64, dtype=torch.int64)
    device_rows.step_inputs(
        rows, query_starts=ints(65), context_lens=ints(64), rows=ints(64), token_ids=index, positions=index,
        slots=index, block_size=16, longest=1,
    )  # fmt: skip
    device_rows.gather_rows(empty(VOCAB, HIDDEN), index)


def rotary(chip: Chip, *, kv_dtype: torch.dtype = torch.bfloat16, pairs: int = HEAD_DIM // 2) -> None:
    angles = empty(4096, pairs, dtype=torch.float32)
    index = ints(64, dtype=torch.int64)
    norm = empty(HEAD_DIM)
    rotary_kv(
        empty(64, (HEADS + 2 * KV_HEADS) * HEAD_DIM), pool(kv_dtype), index, index, angles, angles,
        num_heads=HEADS, query_norm=norm, key_norm=norm, eps=1e-6, dependent=chip.dependent,
    )  # fmt: skip


def fixed(chip: Chip) -> None:
    tilings = fixed_tilings(chip.capability, is_nvidia=chip.target.backend == "cuda", dtype=torch.bfloat16)
    for tiling in tilings:
        fixed_linear(empty(64, HIDDEN), empty(6144, HIDDEN), tilings=[tiling])


def quantized(kind: str, *, dependent: bool = False) -> None:
    data = {
        "int8": ints(6144, HIDDEN, dtype=torch.int8),
        "int4": ints(6144, HIDDEN // 2, dtype=torch.uint8),
        "fp8": empty(6144, HIDDEN, dtype=torch.float8_e4m3fn),
    }[kind]
    scale = empty(6144, *([HIDDEN // 128] if kind == "int4" else []), dtype=torch.float32)
    weight = QuantizedWeight(kind, data, scale, HIDDEN)
    for rows in (1, 64, 2048):
        quantized_linear(empty(rows, HIDDEN), weight, dependent=dependent)
    if kind != "fp8":
        widened(weight, torch.bfloat16)


def experts_of(lines: int, inner: int, kind: str) -> ExpertWeight:
    """A weight of all experts, one below the other."""
    values = empty(EXPERTS * lines, inner)
    if kind == "none":
        return values
    if kind == SMALL_GROUPS:
        weight, groups = quantize(values, "int4"), inner // 32
        scale, zero = empty(len(values), groups, dtype=torch.float32), empty(len(values), groups, dtype=torch.uint8)
        return replace(weight, scale=scale, group=32, zero=zero)
    return quantize_blocks(values) if kind == IN_BLOCKS else quantize(values, kind)


def experts(chip: Chip, kind: str) -> None:
    """A feed-forward part with the tilings for the fewest and the most rows, or all where registers are scarce."""
    rule = RoutingRule(EXPERTS, TOP_EXPERTS, renormalized=True)
    gate_up = experts_of(2 * EXPERT_INTERMEDIATE, EXPERT_HIDDEN, kind)
    down = experts_of(EXPERT_HIDDEN, EXPERT_INTERMEDIATE, kind)
    for tokens in (64, 256, 512, 4096) if kind in ("none", SMALL_GROUPS) else (64, 4096):
        tilings = expert_tilings(
            tokens, top_k=TOP_EXPERTS, num_experts=EXPERTS, weight=down, shared_memory=chip.shared_memory
        )
        routing = expert_choice.route(
            empty(tokens, EXPERTS), rule, kv_slots=ints(tokens, dtype=torch.int64), dependent=chip.dependent
        )
        x = empty(tokens, EXPERT_HIDDEN)
        loads = ints(EXPERTS, dtype=torch.int64)
        multiply_experts(x, routing, gate_up, down, tilings=tilings, loads=loads, dependent=chip.dependent)


def sampled(chip: Chip) -> None:
    logits = empty(64, VOCAB, dtype=torch.float32)
    rows = device_rows.DeviceRows.allocate(num_rows=64, max_tokens=4096, max_blocks=256, device=META)
    whole = ints(64)
    logit_changes.add_bias(logits, whole, whole, empty(64, dtype=torch.float32))
    logit_changes.penalise(logits, ints(64, 3), rows, 4096)
    logit_changes.exclude(logits, RowMasks(ints(64, dtype=torch.int64), ints(64, -(-VOCAB // 32))))
    sampling.sample(logits, ints(64, 2), rows)
    logprobs.logprobs(logits, ints(64, dtype=torch.int64), 20)


def untimed(chip: Chip, *, in_blocks: bool) -> None:
    """An fp8 weight in the kernels that multiply by it without a tuned table."""
    values = empty(2 * INTERMEDIATE, HIDDEN)
    weight = quantize_blocks(values) if in_blocks else quantize(values, "fp8")
    offered = is_offered(chip.capability, is_nvidia=chip.target.backend == "cuda")
    room = ProductRoom.allocate([], multiprocessors=H200.multiprocessors, device=META)
    for rows in (1, 2048):
        quantized_linear(empty(rows, HIDDEN), weight, dependent=chip.dependent)
        for kernel in PRODUCTS if offered else ():
            tilings = untimed_choice(kernel, columns=INTERMEDIATE, inner=HIDDEN, in_blocks=in_blocks, library=False)
            launched = GpuWeight(weight, None, tilings, room, (), chip.dependent)
            if kernel == GATED:
                launched.multiply_gated(empty(rows, HIDDEN))
            elif kernel == ADDED:
                launched.add_to(empty(rows, 2 * INTERMEDIATE), empty(rows, HIDDEN))
            else:
                launched.multiply(empty(rows, HIDDEN))


def persistent(chip: Chip, columns: int, inner: int) -> GpuWeight | None:
    """An fp8 weight that the persistent kernel multiplies by, or None if the chip does not offer it."""
    if not is_offered(chip.capability, is_nvidia=chip.target.backend == "cuda"):
        return None
    tiling = PersistentTiling(128, 128, 128, 8, 4, 1)
    room = ProductRoom.allocate([tiling], multiprocessors=H200.multiprocessors, device=META)
    data, scale = empty(columns, inner, dtype=FP8), empty(columns, dtype=torch.float32)
    weight = QuantizedWeight("fp8", data, scale, inner)
    return GpuWeight(weight, None, ProductChoice((256,), (tiling,)), room, (), chip.dependent)


def persistent_plain(chip: Chip) -> None:
    if weight := persistent(chip, 6144, HIDDEN):
        weight.multiply(empty(256, HIDDEN))


def persistent_added(chip: Chip) -> None:
    if weight := persistent(chip, HIDDEN, INTERMEDIATE):
        weight.add_to(empty(256, HIDDEN), empty(256, INTERMEDIATE))


def persistent_gated(chip: Chip) -> None:
    if weight := persistent(chip, 2 * INTERMEDIATE, HIDDEN):
        weight.multiply_gated(empty(256, HIDDEN))


def texts(head_dim: int, window: int | None = None) -> None:
    q, k, v = empty(512, 3, 12, head_dim).unbind(1)
    text_attention(q, k, v, ints(16, 3), window=window)


CASES = (
    Case("prefill attention", ragged, products=True),
    Case("prefill attention, window", lambda chip: ragged(chip, window=4096), products=True),
    Case("prefill attention, deterministic", lambda chip: ragged(chip, split=SPLIT), products=True),
    Case("attention of encoders", lambda _: texts(64), products=True),
    Case("attention of encoders, window", lambda _: texts(64, window=64), products=True),
    Case("attention of encoders, heads of 128", lambda _: texts(128), products=True),
    Case("prefill attention, fp8 KV", lambda chip: ragged(chip, kv_dtype=torch.float8_e4m3fn), products=True, fp8=True),
    Case("decode attention", decode, products=True),
    Case("decode attention, window", lambda chip: decode(chip, window=4096), products=True),
    Case("decode attention, fp8 KV", lambda chip: decode(chip, kv_dtype=torch.float8_e4m3fn), products=True, fp8=True),
    Case("inputs of a step", inputs),
    Case("norms, rotary, KV write", rotary),
    Case("norms, rotary, KV write, fp8 KV", lambda chip: rotary(chip, kv_dtype=torch.float8_e4m3fn), fp8=True),
    Case("norms, rotary of a part, KV write", lambda chip: rotary(chip, pairs=HEAD_DIM * 3 // 8)),
    Case("norms, no rotary, KV write", lambda chip: rotary(chip, pairs=0)),
    Case("RMS norm", lambda chip: rms_norm.rms_norm(empty(64, HIDDEN), empty(HIDDEN), 1e-6, dependent=chip.dependent)),
    Case(
        "residual, RMS norm",
        lambda chip: rms_norm.add_rms_norm(
            empty(64, HIDDEN), empty(64, HIDDEN), empty(HIDDEN), 1e-6, dependent=chip.dependent
        ),
    ),
    Case(
        "matrix product, deterministic",
        fixed,
        products=True,
    ),
    Case("persistent fp8 product", persistent_plain, products=True, fp8=True),
    Case("persistent fp8 product, added", persistent_added, products=True, fp8=True),
    Case("persistent fp8 SwiGLU products and gate", persistent_gated, products=True, fp8=True),
    Case("int8 weights", lambda chip: quantized("int8"), products=True),
    Case("int4 weights", lambda chip: quantized("int4"), products=True),
    Case("fp8 product", lambda chip: quantized("fp8", dependent=chip.dependent), products=True, fp8=True),
    Case("fp8 product, untimed", lambda chip: untimed(chip, in_blocks=False), products=True, fp8=True),
    Case("fp8 product, in blocks", lambda chip: untimed(chip, in_blocks=True), products=True, fp8=True),
    *(
        Case(f"experts, {kind}", partial(experts, kind=kind), products=True, fp8=kind.startswith("fp8"))
        for kind in ("none", "int8", "int4", SMALL_GROUPS, "fp8", IN_BLOCKS)
    ),
    Case("sampling", sampled),
    Case(
        "SwiGLU gate",
        lambda chip: silu_and_mul.silu_and_mul(empty(64, 2 * INTERMEDIATE), dependent=chip.dependent),
    ),
)
