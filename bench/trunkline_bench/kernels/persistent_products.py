"""Predicted time of a layer's products through the persistent kernel, and the tilings that should be fastest.

The least certain assumption is the kernel's speed within one tile relative to a library's (`own_product_share`).
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from trunkline_bench.gpu.kernels.product_sweep import PERSISTENT_CANDIDATES, PERSISTENT_GATED_CANDIDATES, winner
from trunkline_bench.gpu.kernels.tuned_table import using_table
from trunkline_bench.kernels.device import Device
from trunkline_bench.kernels.work import PRODUCT_TILES, Work, product
from trunkline_kernels.gpu import tuned_tilings
from trunkline_kernels.gpu.persistent_linear import NEVER, PersistentTiling, division_of
from trunkline_kernels.gpu.product_choice import ProductTiling
from trunkline_kernels.gpu.tuned_tilings import ADDED, GATED, ProductKey, name_of
from trunkline_worker.model.architectures.decoder_spec import DecoderSpec
from trunkline_worker.model.gpu_weight import timed_products

DTYPE = torch.bfloat16
OTHER_TILE = 0.6  # relative speed of tiles that PRODUCT_TILES lacks


def persistent_product(
    kernel: str, rows: int, columns: int, inner: int, tiling: PersistentTiling, itemsize: int, device: Device
) -> Work:
    """The work of one launch.  columns: of the result"""
    matrices = 2 if kernel == GATED else 1
    tiles, steps = -(-rows // tiling.rows) * -(-columns // tiling.columns), -(-inner // tiling.inner)
    slots = device.multiprocessors * tiling.programs
    division = division_of(tiles=tiles, steps=steps, programs=slots, least_saved=tiling.least_saved)
    cut = tiles - division.waves * division.programs
    is_shared = division.sharing > cut
    # Steps of the program with the most work, while all others on its multiprocessor compute too.
    most_steps = division.waves * steps + (-(-cut * steps // division.sharing) if cut else 0)
    at_once = min(tiling.programs, math.ceil(division.programs / device.multiprocessors))
    nearness = PRODUCT_TILES.get((tiling.rows, tiling.columns * matrices), OTHER_TILE)
    of_program = device.peak_flops / device.multiprocessors * device.own_product_share * nearness / at_once
    of_tile = tiling.rows * tiling.columns * matrices
    # Results of tiles that several programs share are written and read again in float32.
    shares = 8.0 * (division.sharing + cut - 1) * of_tile * min(1.0, rows / tiling.rows) if is_shared else 0.0
    moved = rows * inner + matrices * columns * inner + rows * columns * (2 if kernel == ADDED else 1)
    return Work(
        "persistent_matmul",
        programs=division.programs,
        slots=slots,
        bytes=itemsize * moved + shares,
        flops=2.0 * rows * columns * matrices * inner,
        flops_per_s=device.peak_flops,
        least_s=most_steps * 2.0 * of_tile * tiling.inner / of_program,
        tail_s=device.meet_s if is_shared else 0.0,
    )


def best_tiling(kernel: str, rows: int, columns: int, inner: int, device: Device) -> PersistentTiling | None:
    """The fastest of the sweep's candidates, or None if the library should be faster."""
    times_s: dict[ProductTiling, float] = {
        tiling: persistent_product(kernel, rows, columns, inner, tiling, DTYPE.itemsize, device).seconds(device)
        for candidate in (PERSISTENT_GATED_CANDIDATES if kernel == GATED else PERSISTENT_CANDIDATES)
        for tiling in (candidate, replace(candidate, least_saved=NEVER))
    }
    best = winner(_library_s(kernel, rows, columns, inner, device), times_s)
    assert best is None or isinstance(best, PersistentTiling)
    return best


def _library_s(kernel: str, rows: int, columns: int, inner: int, device: Device) -> float:
    """Time of the library's product; the gate, if any, is a separate launch."""
    size = DTYPE.itemsize
    if kernel != GATED:
        out_size = size * (2 if kernel == ADDED else 1)
        return product("", rows, columns, inner, size, out_size, device).seconds(device)
    gate = Work("", device.multiprocessors, device.multiprocessors, 3.0 * rows * columns * size, least_s=device.least_s)
    both = product("", rows, 2 * columns, inner, size, size, device)
    return both.seconds(device) + device.node_s + gate.seconds(device)


@contextmanager
def best_tilings(spec: DecoderSpec, rows: int, device: Device) -> Iterator[None]:
    """Decoders on a chip with the device's name use the fastest predicted tilings for products of `rows` rows, as if
    the product sweep had measured the predicted times."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "tuned.json"
        for kernel, columns, inner in timed_products(spec.layers[0]):
            best = best_tiling(kernel, rows, columns, inner, device)
            key = ProductKey(kernel, device.name, rows, columns, inner, name_of(DTYPE))
            tuned_tilings.write(file, {key: ({} if best is None else asdict(best), {})})
        with using_table(file):
            yield
