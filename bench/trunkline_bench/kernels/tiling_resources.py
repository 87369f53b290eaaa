"""Compiles every tiling of the shipped table and of the sweeps of `make bench-gpu`, and reports its resources.

usage: python -m trunkline_bench.kernels.tiling_resources [--file tuned.json] [--every 1]

Compiles for sm_90, without a GPU. Exits with status 1 if a kernel spills registers, does not use tensor cores, or needs
more shared memory than the chip has.
"""

import argparse
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch

from trunkline_bench.gpu.kernels.product_sweep import candidates, product
from trunkline_bench.gpu.kernels.tiling_sweep import DECODE_CANDIDATES, NARROW_CANDIDATES, RAGGED_CANDIDATES
from trunkline_bench.kernels.device import H200, programs_per_multiprocessor
from trunkline_bench.kernels.launches import CHIPS, META, Launch, recorded, resources
from trunkline_kernels.gpu.decode_attention import decode_attention
from trunkline_kernels.gpu.decode_plan import DecodePlan
from trunkline_kernels.gpu.decode_tiling import DecodeTiling
from trunkline_kernels.gpu.persistent_linear import PersistentTiling, ProductRoom
from trunkline_kernels.gpu.product_choice import WEIGHT_TYPES, ProductTiling, product_tiling
from trunkline_kernels.gpu.prompt_attention import KERNEL as PROMPT_CHOICE
from trunkline_kernels.gpu.ragged_attention import RaggedTiling, ragged_attention
from trunkline_kernels.gpu.shared_prefix import PrefixRoom, SharedPrefixes
from trunkline_kernels.gpu.tuned_tilings import (
    ADDED,
    GATED,
    LINEAR,
    SHIPPED,
    Key,
    ProductKey,
    TilingKey,
    name_of,
    table,
)
from trunkline_kernels.quantized_weight import FP8, quantize, quantize_blocks
from trunkline_kernels.ragged_batch import KVLayer

CHIP = CHIPS["sm_90"]
KV_HEADS, SEQUENCES, BLOCK_SIZE = 8, 64, 16
Tiling = DecodeTiling | RaggedTiling | ProductTiling
BESIDE_PRODUCTS = ("_quantize_rows", "_silu_and_mul")  # launches that have no tiling
ATTENTION: dict[str, type[DecodeTiling | RaggedTiling]] = {
    "decode_attention": DecodeTiling, "ragged_attention": RaggedTiling
}  # fmt: skip


def tilings(file: Path) -> Iterator[tuple[Key, Tiling]]:
    """The tilings of a table, and those of the sweeps."""
    for key, fields in table(file).items():
        if fields and key.kernel != PROMPT_CHOICE:  # otherwise the library was faster
            is_product = isinstance(key, ProductKey)
            yield key, product_tiling(key.kernel, fields) if is_product else ATTENTION[key.kernel](**fields)
    for candidate in (*DECODE_CANDIDATES, *RAGGED_CANDIDATES):
        kernel = "decode_attention" if isinstance(candidate, DecodeTiling) else "ragged_attention"
        yield TilingKey(kernel, "", 128, 4, "bfloat16", "bfloat16"), candidate
    for candidate in NARROW_CANDIDATES:
        yield TilingKey("decode_attention", "", 128, 4, "bfloat16", name_of(FP8)), candidate
    for kernel, columns in ((GATED, 12_288), (LINEAR, 6144), (ADDED, 4096)):
        for in_blocks, dtype in WEIGHT_TYPES.items():
            key = ProductKey(kernel, "", 256, columns, 4096, dtype)
            for product_candidate in candidates(kernel, key.rows, persistent=True, in_blocks=in_blocks):
                yield key, product_candidate


def launch(key: Key, tiling: Tiling) -> Launch:
    """The recorded launch of the kernel with this tiling."""
    with recorded() as launches:
        if isinstance(key, ProductKey):
            assert isinstance(tiling, ProductTiling), key
            _multiply(key, tiling)
        else:
            assert isinstance(tiling, DecodeTiling | RaggedTiling), key
            _attend(key, tiling)
    return next(launch for launch in launches if launch.kernel.__name__ not in BESIDE_PRODUCTS)


def _multiply(key: ProductKey, tiling: ProductTiling) -> None:
    matrices = 2 if key.kernel == GATED else 1
    matrix = torch.empty(matrices * key.columns, key.inner, device=META)
    weight = quantize_blocks(matrix) if key.dtype == WEIGHT_TYPES[True] else quantize(matrix, "fp8")
    x = torch.empty(key.rows, key.inner, dtype=torch.bfloat16, device=META)
    persistent = [tiling] if isinstance(tiling, PersistentTiling) else []
    room = ProductRoom.allocate(persistent, multiprocessors=H200.multiprocessors, device=META)
    product(key.kernel, tiling, x, weight, room, dependent=CHIP.dependent)()


def _attend(key: TilingKey, tiling: DecodeTiling | RaggedTiling) -> None:
    dtype, kv_dtype = (getattr(torch, name) for name in (key.dtype, key.kv_dtype))
    q = torch.empty(SEQUENCES, key.group * KV_HEADS, key.head_dim, dtype=dtype, device=META)
    pool = torch.empty(1024, BLOCK_SIZE, KV_HEADS, key.head_dim, dtype=kv_dtype, device=META)
    scale = None if kv_dtype == dtype else torch.empty(1, device=META)
    kv = KVLayer(pool, pool, scale, scale)
    lens, tables = _ints(SEQUENCES), _ints(SEQUENCES, 128)
    if isinstance(tiling, DecodeTiling):
        plan = DecodePlan.allocate(
            max_seqs=SEQUENCES, num_heads=q.shape[1], num_kv_heads=KV_HEADS, head_dim=key.head_dim,
            num_multiprocessors=H200.multiprocessors, tiling=tiling, device=META,
        )  # fmt: skip
        room = PrefixRoom.allocate(num_tiles=1, tile_seqs=1, num_heads=q.shape[1], head_dim=key.head_dim, device=META)
        decode_attention(
            q, kv, q, context_lens=lens, rows=lens, block_tables=tables, plan=plan,
            prefixes=SharedPrefixes(_ints(0, 5), _ints(SEQUENCES, 3), room), scale=0.1, dependent=CHIP.dependent,
        )  # fmt: skip
    else:
        ragged_attention(
            q, kv, q, tiles=_ints(16, 4), query_starts=_ints(SEQUENCES + 1), context_lens=lens, rows=lens,
            block_tables=tables, tiling=tiling, scale=0.1,
        )  # fmt: skip


def _ints(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32, device=META)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, default=SHIPPED)
    parser.add_argument("--every", type=int, default=1, help="compile one of so many")
    arguments, bad = parser.parse_args(), False
    for key, tiling in islice(tilings(arguments.file), 0, None, arguments.every):
        found = resources(launch(key, tiling), CHIP)
        fit = programs_per_multiprocessor(H200, warps=tiling.warps, registers=found.registers, shared=found.shared)
        wrong = [
            text
            for text, is_so in (
                (f"spills {found.spills} bytes", found.spills > 0),
                ("does not use tensor cores", not found.tensor_cores),
                ("does not fit the shared memory", found.shared > CHIP.shared_memory),
                ("accesses memory before it waits for its inputs", found.waits_late),
                (
                    f"assumes {tiling.programs} programs at once" if isinstance(tiling, PersistentTiling) else "",
                    isinstance(tiling, PersistentTiling) and fit < tiling.programs,
                ),
            )
            if is_so
        ]
        bad |= bool(wrong)
        print(
            f"{key.kernel}, {tiling}: {found.registers} registers, {found.shared:,} bytes of shared memory, "
            f"{fit} programs at once{''.join(f'; {text}' for text in wrong)}",
            flush=True,
        )
    sys.exit(bad)


if __name__ == "__main__":
    main()
