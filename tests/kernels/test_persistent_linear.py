"""Products whose programs divide the work evenly, interpreted, against torch's. The interpreter carries out tensor
descriptors, so that it is the launched kernel that is tested."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import linear

from trunkline_kernels.gpu import persistent_linear as persistent
from trunkline_kernels.gpu.persistent_linear import (
    FEWEST_STEPS,
    LEAST_SAVED,
    NEVER,
    PersistentTiling,
    ProductRoom,
    add_persistent_linear,
    division_of,
    is_offered,
    persistent_gated_linear,
    persistent_linear,
)
from trunkline_kernels.gpu.quantized_linear import quantize_rows
from trunkline_kernels.quantized_weight import QuantizedWeight, dequantize, quantize
from trunkline_kernels.silu_and_mul import silu_and_mul

TILING = PersistentTiling(16, 32, 32, 4, 1, 1)
# Rows, columns, inner, multiprocessors.
WHOLE = [(1, 16, 32, 1), (33, 70, 80, 2), (5, 96, 128, 3)]
SHARED = [
    (5, 40, 1280, 7),  # fewer tiles than programs: all are cut
    (20, 100, 1040, 3),  # whole tiles first; the inner dimension ends within a tile
    (1, 30, 2000, 4),  # one tile, and several programs
    (70, 130, 528, 8),  # rows and columns that end within tiles
]


def room_for(multiprocessors: int, tiling: PersistentTiling = TILING) -> ProductRoom:
    room = ProductRoom.allocate([tiling], multiprocessors=multiprocessors, device=torch.device("cpu"))
    room.shares.fill_(float("nan"))
    return room


def drawn(rows: int, columns: int, inner: int) -> tuple[Tensor, QuantizedWeight]:
    generator = torch.Generator().manual_seed(rows + columns)
    x, weight = (torch.randn(size, inner, generator=generator) / inner**0.25 for size in (rows, columns))
    return x, quantize(weight, "fp8")


def product_of(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """The product of what the 8-bit numbers stand for."""
    narrow, scale = quantize_rows(x)
    return linear(narrow.float() * scale[:, None], dequantize(weight))


def is_shared(rows: int, columns: int, inner: int, multiprocessors: int) -> bool:
    tiles, steps = -(-rows // TILING.rows) * -(-columns // TILING.columns), -(-inner // TILING.inner)
    division = division_of(tiles=tiles, steps=steps, programs=multiprocessors)
    return division.sharing > tiles - division.waves * division.programs


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("rows", "columns", "inner", "multiprocessors"), [*WHOLE, *SHARED])
def test_products_equal_those_of_what_they_stand_for(rows: int, columns: int, inner: int, multiprocessors: int) -> None:
    (x, weight), room = drawn(rows, columns, inner), room_for(multiprocessors)
    assert_close(persistent_linear(x, weight, TILING, room), product_of(x, weight))
    assert not room.arrivals.any(), "the next product finds counters that are not zero"


@pytest.mark.parametrize(("rows", "columns", "inner", "multiprocessors"), [*WHOLE[1:2], *SHARED])
def test_products_are_added_to_what_is_there(rows: int, columns: int, inner: int, multiprocessors: int) -> None:
    (x, weight), room = drawn(rows, columns, inner), room_for(multiprocessors)
    residual = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    expected = residual + product_of(x, weight)
    add_persistent_linear(x, weight, TILING, room, out=residual)
    assert_close(residual, expected)


@pytest.mark.parametrize(("rows", "columns", "inner", "multiprocessors"), [*WHOLE[1:2], *SHARED])
def test_gated_products_equal_products_and_gate(rows: int, columns: int, inner: int, multiprocessors: int) -> None:
    (x, weight), room = drawn(rows, 2 * columns, inner), room_for(multiprocessors)
    assert_close(persistent_gated_linear(x, weight, TILING, room), silu_and_mul(product_of(x, weight)))


def test_the_cases_share_tiles_and_do_not() -> None:
    assert not any(is_shared(*case) for case in WHOLE)
    assert all(is_shared(*case) for case in SHARED)


def test_results_are_rounded_once_and_where_two_kernels_round() -> None:
    generator = torch.Generator().manual_seed(1)
    # Products of small integers are exact in 8 and 16 bits, so that only the gate's own rounding is left.
    x, wide = (torch.randint(-1, 2, (size, 640), generator=generator).half() for size in (9, 48))
    weight, room = quantize(wide, "fp8"), room_for(5)
    found = persistent_gated_linear(x, weight, TILING, room)
    torch.testing.assert_close(found, silu_and_mul(linear(x, wide)), rtol=2e-3, atol=1e-6)
    residual = torch.randint(-2, 3, (9, 48), generator=generator).half() / 4
    expected = (residual.float() + x.float() @ wide.float().t()).half()
    add_persistent_linear(x, weight, TILING, room, out=residual)
    assert torch.equal(residual, expected)


def test_no_rows_are_no_launch() -> None:
    _, weight = drawn(1, 32, 16)
    assert persistent_linear(torch.empty(0, 16), weight, TILING, room_for(1)).shape == (0, 32)


def test_room_for_several_tilings_is_room_for_each() -> None:
    other = PersistentTiling(32, 64, 32, 4, 1, 2)
    room = ProductRoom.allocate([TILING, other], multiprocessors=5, device=torch.device("cpu"))
    x, weight = drawn(5, 60, 640)
    for tiling in (TILING, other):
        assert_close(persistent_linear(x, weight, tiling, room), product_of(x, weight))
    assert len(room.shares) == len(room_for(5, other).shares)
    none = ProductRoom.allocate([], multiprocessors=132, device=torch.device("cpu"))
    assert none.shares.numel() == none.arrivals.numel() == 0


@pytest.mark.parametrize(
    ("capability", "is_nvidia", "expected"),
    [((8, 0), True, False), ((8, 9), True, False), ((9, 0), True, True), ((10, 0), True, True), ((9, 4), False, False)],
)
def test_only_devices_that_fetch_tiles_by_themselves(
    capability: tuple[int, int], is_nvidia: bool, expected: bool
) -> None:
    assert is_offered(capability, is_nvidia=is_nvidia) == expected


@given(st.integers(1, 2000), st.integers(1, 400), st.integers(1, 300))
@settings(max_examples=200, deadline=None)
def test_every_step_of_every_tile_is_one_programs(tiles: int, steps: int, programs: int) -> None:
    division = division_of(tiles=tiles, steps=steps, programs=programs)
    cut = tiles - division.waves * division.programs
    assert 0 <= cut <= division.sharing <= division.programs <= programs
    if not cut:
        assert division.sharing == 0
        return
    program_of = persistent._program_of.fn
    bounds = [cut * steps * number // division.sharing for number in range(division.sharing + 1)]
    assert bounds[0] == 0
    assert bounds[-1] == cut * steps
    shares = [end - begin for begin, end in pairwise(bounds)]
    assert max(shares) - min(shares) <= 1
    assert min(shares) >= 1
    assert max(shares) <= steps, "a share is of two tiles at most"
    if division.sharing > cut:
        assert steps - max(shares) >= LEAST_SAVED
        assert min(shares) >= min(FEWEST_STEPS, steps)
    for number in range(division.sharing):
        assert program_of(bounds[number], cut * steps, division.sharing) == number
        assert program_of(bounds[number + 1] - 1, cut * steps, division.sharing) == number


def test_a_tiling_may_leave_tiles_whole() -> None:
    assert division_of(tiles=192, steps=64, programs=132, least_saved=NEVER).sharing == 60
    (x, weight), tiling = drawn(5, 40, 1280), replace(TILING, least_saved=NEVER)
    room = room_for(7)
    assert_close(persistent_linear(x, weight, tiling, room), product_of(x, weight))
    assert room.shares.isnan().all(), "a tile was cut"


@pytest.mark.parametrize(
    ("tiles", "steps", "programs", "waves", "sharing"),
    [
        (192, 64, 132, 1, 132),  # gate and up of 256 rows: 1.45 waves instead of 2
        (96, 64, 132, 0, 132),  # qkv of 256 rows
        (128, 64, 132, 0, 128),  # too little would be saved
        (264, 64, 132, 2, 0),  # nothing remains
        (1, 64, 132, 0, 16),  # no share is shorter than four steps
    ],
)
def test_tiles_are_cut_where_that_saves_time(tiles: int, steps: int, programs: int, waves: int, sharing: int) -> None:
    division = division_of(tiles=tiles, steps=steps, programs=programs)
    assert (division.waves, division.sharing) == (waves, sharing)
