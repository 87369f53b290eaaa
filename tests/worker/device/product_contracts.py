"""What the kernels of matrix products assume."""

import torch

from tests.worker.device.launches import FLOAT32, WIDE, Launch


def _gated_matmul(at: Launch) -> None:
    rows, columns, inner = at.number("num_rows"), at.number("num_columns"), at.number("INNER")
    at.holds("x", WIDE, rows * inner)
    at.holds("weight", (at["x"].dtype,), 2 * columns * inner)
    at.holds("out", (at["x"].dtype,), rows * columns)
    _tiled(at)
    at.powers_of_two("TILE_ROWS", "TILE_COLUMNS", "TILE_INNER")


def _product(at: Launch, kind: torch.dtype) -> None:
    rows, columns = at.number("num_rows"), at.number("num_columns")
    at.holds("x", (*WIDE, torch.float8_e4m3fn), rows * at.number("INNER"))
    at.holds("out", WIDE, rows * columns)
    if at["BIAS"]:
        at.holds("bias", WIDE, columns)
    at.powers_of_two("TILE_ROWS", "TILE_COLUMNS")


def _fixed_matmul(at: Launch) -> None:
    _product(at, at["weight"].dtype)
    at.holds("weight", (at["x"].dtype,), at.number("num_columns") * at.number("INNER"))
    _tiled(at)
    at.powers_of_two("TILE_INNER")


def _weight_only(at: Launch) -> None:
    columns, inner = at.number("num_columns"), at.number("INNER")
    _product(at, at["x"].dtype)
    if at["FOUR_BITS"]:
        at.require(inner % at.number("GROUP") == 0, f"groups of {at.number('GROUP')} in {inner}")
        at.holds("weight", (torch.uint8,), columns * inner // 2)
        at.holds("scale", FLOAT32, columns * inner // at.number("GROUP"))
        if at["ZEROS"]:
            at.holds("zero", (torch.uint8,), columns * inner // at.number("GROUP"))
        at.require(at.number("GROUP") % at.number("HALF") == 0 and inner % (2 * at.number("HALF")) == 0, "HALF")
    else:
        at.holds("weight", (torch.int8,), columns * inner)
        at.holds("scale", FLOAT32, columns)
    at.powers_of_two("HALF")
    _tiled(at)


def _tiled(at: Launch) -> None:
    tiles = -(-at.number("num_rows") // at.number("TILE_ROWS")) * -(
        -at.number("num_columns") // at.number("TILE_COLUMNS")
    )
    at.require(at.grid == (tiles,), f"{tiles} tiles")


def _quantize_rows(at: Launch) -> None:
    rows, inner = at.grid[0], at.number("INNER")
    at.holds("x", WIDE, rows * inner)
    at.holds("out", (torch.float8_e4m3fn,), rows * inner)
    at.holds("scale", FLOAT32, rows)
    at.require(at.number("PADDED") >= inner, "PADDED")
    at.powers_of_two("PADDED")


def _fp8_product(at: Launch) -> None:
    rows, columns = at.number("num_rows"), at.number("num_columns")
    _product(at, torch.float8_e4m3fn)
    at.holds("x", (torch.float8_e4m3fn,), 0)
    at.holds("x_scale", FLOAT32, rows)
    at.holds("weight", (torch.float8_e4m3fn,), columns * at.number("INNER"))
    at.holds("scale", FLOAT32, columns)
    at.powers_of_two("TILE_INNER")
    _tiled(at)


CONTRACTS = (
    _gated_matmul,
    _fixed_matmul,
    _weight_only,
    _quantize_rows,
    _fp8_product,
)
