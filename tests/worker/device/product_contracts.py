"""What the kernels of matrix products assume."""

import torch

from tests.worker.device.launches import FLOAT32, INT32, WIDE, Launch
from trunkline_kernels.quantized_weight import BLOCK


def _persistent_matmul(at: Launch) -> None:
    rows, columns, inner = at.number("num_rows"), at.number("num_columns"), at.number("inner")
    tile_rows, tile_columns, tile_inner = (at.number(f"TILE_{name}") for name in ("ROWS", "COLUMNS", "INNER"))
    matrices = 2 if at["GATED"] else 1
    dtype = torch.float8_e4m3fn
    if at["BLOCKS"]:
        at.holds("row_factors", FLOAT32, rows * -(-inner // tile_inner))
        at.holds("column_factors", FLOAT32, -(-matrices * columns // tile_inner) * -(-inner // tile_inner))
        _in_blocks(at, tile_columns, tile_inner)
        at.require(not at["GATED"] or columns % tile_inner == 0, f"gate and up share a block of {tile_inner}")
    else:
        at.holds("row_factors", FLOAT32, rows)
        at.holds("column_factors", FLOAT32, matrices * columns)
    at.describes("x", (dtype,), (rows, inner), (tile_rows, tile_inner))
    at.describes("weight", (dtype,), (matrices * columns, inner), (tile_columns, tile_inner))
    at.require(inner % 16 == 0, f"rows of {inner} bytes")
    at.holds("weight_rows", (dtype,), matrices * columns * inner)
    at.holds("out", WIDE, rows * columns)
    at.powers_of_two("TILE_ROWS", "TILE_COLUMNS", "TILE_INNER", "MERGED_COLUMNS")
    at.require(tile_columns % at.number("MERGED_COLUMNS") == 0, "MERGED_COLUMNS")
    tiles, steps = -(-rows // tile_rows) * -(-columns // tile_columns), -(-inner // tile_inner)
    programs, waves, sharing = at.grid[0], at.number("waves"), at.number("sharing")
    cut = tiles - waves * programs
    at.require(0 <= cut <= sharing <= programs, f"{sharing} of {programs} programs share {cut} of {tiles} tiles")
    at.require(sharing <= cut * steps, f"{sharing} programs share {cut * steps} steps")
    at.holds("shares", FLOAT32, 2 * sharing * matrices * tile_rows * tile_columns if sharing > cut else 0)
    at.holds("arrivals", INT32, cut if sharing > cut else 0)


def _in_blocks(at: Launch, tile_columns: int, tile_inner: int) -> None:
    at.require(tile_inner == BLOCK and BLOCK % tile_columns == 0, f"tiles of {tile_columns} x {tile_inner} in blocks")


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
    rows, inner = at.number("num_rows"), at.number("INNER")
    at.require(at.grid == (rows,), f"{rows} rows")
    at.holds("x", WIDE, rows * inner)
    at.holds("out", (torch.float8_e4m3fn,), rows * inner)
    at.holds("scale", FLOAT32, rows * -(-inner // at.number("GROUP")))
    at.require(at.number("GROUP") * at.number("GROUPS") >= inner, "GROUPS")
    at.powers_of_two("GROUP", "GROUPS")


def _widen(at: Launch) -> None:
    columns, inner, half = at.grid[0], at.number("INNER"), at.number("HALF")
    if at["FOUR_BITS"]:
        groups = columns * inner // at.number("GROUP")
        at.require(inner % at.number("GROUP") == 0, f"groups of {at.number('GROUP')} in {inner}")
        at.require(at.number("GROUP") % half == 0 and inner % (2 * half) == 0, "HALF")
        at.holds("weight", (torch.uint8,), columns * inner // 2)
        at.holds("scale", FLOAT32, groups)
        if at["ZEROS"]:
            at.holds("zero", (torch.uint8,), groups)
    else:
        at.holds("weight", (torch.int8,), columns * inner)
        at.holds("scale", FLOAT32, columns)
    at.holds("out", WIDE, columns * inner)
    at.require(at.grid[1] * at.number("PIECES") * 2 * half >= inner, "pieces")
    at.powers_of_two("HALF", "PIECES")


def _fp8_product(at: Launch) -> None:
    rows, columns, inner = at.number("num_rows"), at.number("num_columns"), at.number("INNER")
    _product(at, torch.float8_e4m3fn)
    at.holds("x", (torch.float8_e4m3fn,), 0)
    at.holds("weight", (torch.float8_e4m3fn,), columns * inner)
    if block := at.number("BLOCK"):
        at.holds("x_scale", FLOAT32, rows * -(-inner // block))
        at.holds("scale", FLOAT32, -(-columns // block) * -(-inner // block))
        _in_blocks(at, at.number("TILE_COLUMNS"), at.number("TILE_INNER"))
    else:
        at.holds("x_scale", FLOAT32, rows)
        at.holds("scale", FLOAT32, columns)
    at.powers_of_two("TILE_INNER")
    _tiled(at)


CONTRACTS = (
    _persistent_matmul,
    _fixed_matmul,
    _weight_only,
    _quantize_rows,
    _widen,
    _fp8_product,
)
