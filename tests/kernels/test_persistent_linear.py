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
    Factors,
    PersistentTiling,
    ProductRoom,
    add_persistent_linear,
    division_of,
    is_offered,
    persistent_gated_linear,
    persistent_linear,
)
from trunkline_kernels.gpu.quantized_linear import dequantize, quantize, quantize_rows
from trunkline_kernels.silu_and_mul import silu_and_mul

TILING = PersistentTiling(16, 32, 16, 4, 1, 1)
# Rows, columns, inner, multiprocessors.
WHOLE = [(1, 16, 16, 1), (33, 70, 40, 2), (5, 96, 64, 3)]
SHARED = [
    (5, 40, 640, 7),  # fewer tiles than programs: all are cut
    (20, 100, 520, 3),  # whole tiles first; the inner dimension ends within a tile
    (1, 30, 1000, 4),  # one tile, and several programs
    (70, 130, 264, 8),  # rows and columns that end within tiles
]


def room_for(multiprocessors: int, tiling: PersistentTiling = TILING) -> ProductRoom:
    room = ProductRoom.allocate([tiling], multiprocessors=multiprocessors, device=torch.device("cpu"))
    room.shares.fill_(float("nan"))
    return room


def drawn(rows: int, columns: int, inner: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + columns)
    return tuple(torch.randn(size, inner, generator=generator) / inner**0.25 for size in (rows, columns))


def is_shared(rows: int, columns: int, inner: int, multiprocessors: int) -> bool:
    tiles, steps = -(-rows // TILING.rows) * -(-columns // TILING.columns), -(-inner // TILING.inner)
    division = division_of(tiles=tiles, steps=steps, programs=multiprocessors)
    return division.sharing > tiles - division.waves * division.programs


@pytest.mark.parametrize(("rows", "columns", "inner", "multiprocessors"), [*WHOLE, *SHARED])
def test_products_equal_the_librarys(rows: int, columns: int, inner: int, multiprocessors: int) -> None:
    (x, weight), room = drawn(rows, columns, inner), room_for(multiprocessors)
    torch.testing.assert_close(persistent_linear(x, weight, TILING, room), linear(x, weight))
    assert not room.arrivals.any(), "the next product finds counters that are not zero"


@pytest.mark.parametrize(("rows", "columns", "inner", "multiprocessors"), [*WHOLE[1:2], *SHARED])
def test_products_are_added_to_what_is_there(rows: int, columns: int, inner: int, multiprocessors: int) -> None:
    (x, weight), room = drawn(rows, columns, inner), room_for(multiprocessors)
    residual = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    expected = torch.addmm(residual, x, weight.t())
    add_persistent_linear(x, weight, residual, TILING, room)
    torch.testing.assert_close(residual, expected)


@pytest.mark.parametrize(("rows", "columns", "inner", "multiprocessors"), [*WHOLE[1:2], *SHARED])
def test_gated_products_equal_products_and_gate(rows: int, columns: int, inner: int, multiprocessors: int) -> None:
    (x, weight), room = drawn(rows, 2 * columns, inner), room_for(multiprocessors)
    found = persistent_gated_linear(x, weight, TILING, room)
    torch.testing.assert_close(found, silu_and_mul(linear(x, weight)))


def test_the_cases_share_tiles_and_do_not() -> None:
    assert not any(is_shared(*case) for case in WHOLE)
    assert all(is_shared(*case) for case in SHARED)


def test_results_are_rounded_once_and_where_two_kernels_round() -> None:
    generator = torch.Generator().manual_seed(1)
    # Products of small integers are exact in 16 bits, so that only the gate's own rounding is left.
    x, weight = (torch.randint(-1, 2, (size, 320), generator=generator).half() for size in (9, 48))
    room = room_for(5)
    torch.testing.assert_close(
        persistent_gated_linear(x, weight, TILING, room), silu_and_mul(linear(x, weight)), rtol=2e-3, atol=1e-6
    )
    residual = torch.randint(-2, 3, (9, 48), generator=generator).half() / 4
    expected = (residual.float() + x.float() @ weight.float().t()).half()
    add_persistent_linear(x, weight, residual, TILING, room)
    assert torch.equal(residual, expected)


@pytest.mark.parametrize(
    ("rows", "columns", "inner", "multiprocessors"), [(33, 70, 48, 2), *SHARED[1:2], (9, 66, 640, 5)]
)
def test_products_of_8_bit_floats_equal_those_of_what_they_stand_for(
    rows: int, columns: int, inner: int, multiprocessors: int
) -> None:
    (x, wide), room = drawn(rows, 2 * columns, inner // 16 * 16), room_for(multiprocessors)
    weight = quantize(wide, "fp8")
    narrow, scale = quantize_rows(x)
    factors = Factors(scale, weight.scale)
    expected = linear(narrow.float() * scale[:, None], dequantize(weight))
    found = persistent_linear(narrow, weight.data, TILING, room, factors=factors, dtype=torch.float32)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    gated = persistent_gated_linear(narrow, weight.data, TILING, room, factors=factors, dtype=torch.float32)
    torch.testing.assert_close(gated, silu_and_mul(expected), rtol=1e-4, atol=1e-4)
    residual = expected.clone()
    add_persistent_linear(narrow, weight.data, residual, TILING, room, factors=factors)
    torch.testing.assert_close(residual, 2 * expected, rtol=1e-4, atol=1e-4)


def test_no_rows_are_no_launch() -> None:
    assert persistent_linear(torch.empty(0, 16), torch.empty(32, 16), TILING, room_for(1)).shape == (0, 32)


def test_room_for_several_tilings_is_room_for_each() -> None:
    other = PersistentTiling(32, 64, 16, 4, 1, 2)
    room = ProductRoom.allocate([TILING, other], multiprocessors=5, device=torch.device("cpu"))
    x, weight = drawn(5, 60, 320)
    for tiling in (TILING, other):
        torch.testing.assert_close(persistent_linear(x, weight, tiling, room), linear(x, weight))
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
    (x, weight), tiling = drawn(5, 40, 640), replace(TILING, least_saved=NEVER)
    room = room_for(7)
    torch.testing.assert_close(persistent_linear(x, weight, tiling, room), linear(x, weight))
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
