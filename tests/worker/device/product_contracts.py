"""What the kernels of matrix products assume."""

import torch

from tests.worker.device.launches import FLOAT32, INT32, INT64, WIDE, Launch
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


def _choose_experts(at: Launch) -> None:
    tokens, groups, members, top_k = at.grid[0], at.number("GROUPS"), at.number("MEMBERS"), at.number("TOP_K")
    at.holds("logits", WIDE, tokens * groups * members)
    if at["BIAS"]:
        at.holds("bias", FLOAT32, groups * members)
    if at["PADDING"]:
        at.holds("kv_slots", INT64, tokens)
    at.holds("experts", INT32, tokens * top_k)
    at.holds("shares", FLOAT32, tokens * top_k)
    at.require(top_k <= at.number("TOP_GROUPS") * members <= groups * members, f"{top_k} of {groups} x {members}")
    for name, count in (("PADDED_GROUPS", groups), ("PADDED_MEMBERS", members), ("PADDED_K", top_k)):
        at.powers_of_two(name)
        at.require(at.number(name) >= count, name)


def _arrange_tiles(at: Launch) -> None:
    experts, pairs = at.grid[0], at.number("num_pairs")
    at.holds("experts", INT32, pairs)
    if at["COUNTED"]:
        at.holds("loads", INT64, experts)
    _holds_tiles(at, pairs=pairs, experts=experts)
    at.powers_of_two("PADDED", "TILE_ROWS", "BLOCK")
    at.require(at.number("PADDED") >= experts, "PADDED")


def _holds_tiles(at: Launch, *, pairs: int, experts: int) -> None:
    """Those of the worst step, in which all experts but one have a single pair."""
    rows, used = at.number("TILE_ROWS"), min(pairs, experts)
    tiles = used - 1 + -(-(pairs - used + 1) // rows)
    at.holds("tile_experts", INT32, tiles)
    at.holds("tile_pairs", INT32, tiles * rows)
    at.holds("num_tiles", INT32, 1)


def _expert_product(at: Launch) -> None:
    columns, inner, rows = at.number("COLUMNS"), at.number("INNER"), at.number("num_rows")
    pairs, lines = rows * at.number("PAIRS_PER_ROW"), columns * (2 if at["GATED"] else 1)
    at.holds("x", (torch.float8_e4m3fn,) if at["NARROW"] else WIDE, rows * inner)
    at.holds("out", WIDE, pairs * columns)
    elements = at["weight"].numel() * (2 if at["FOUR_BITS"] else 1)
    experts = elements // (lines * inner)
    at.require(elements == experts * lines * inner, f"{elements} elements are no experts of {lines} x {inner}")
    if block := at.number("BLOCK"):
        at.holds("weight", (torch.float8_e4m3fn,), 0)
        at.require(lines % block == columns % block == 0, f"an expert begins within a block of {block}")
        _in_blocks(at, at.number("TILE_COLUMNS"), at.number("TILE_INNER"))
        at.holds("x_scale", FLOAT32, rows * -(-inner // block))
        at.holds("scale", FLOAT32, experts * lines // block * -(-inner // block))
    elif at["FOUR_BITS"]:
        group, half = at.number("GROUP"), at.number("HALF")
        at.holds("weight", (torch.uint8,), 0)
        at.require(inner % group == group % half == inner % (2 * half) == 0, f"groups of {group} in {inner}")
        at.require(at.number("TILE_INNER") == 2 * half, "TILE_INNER")
        at.holds("scale", FLOAT32, experts * lines * inner // group)
        if at["ZEROS"]:
            at.holds("zero", (torch.uint8,), experts * lines * inner // group)
    elif at["SCALED"]:
        at.holds("weight", (torch.float8_e4m3fn,) if at["NARROW"] else (torch.int8,), 0)
        at.holds("scale", FLOAT32, experts * lines)
        if at["NARROW"]:
            at.holds("x_scale", FLOAT32, rows)
    else:
        at.holds("weight", (at["x"].dtype,), 0)
    at.powers_of_two("TILE_ROWS", "TILE_COLUMNS", "TILE_INNER", "HALF")
    _holds_tiles(at, pairs=pairs, experts=experts)
    most = len(at["tile_experts"]) * -(-columns // at.number("TILE_COLUMNS"))
    at.require(at.grid == (most,), f"up to {most} tiles")


def _sum_experts(at: Launch) -> None:
    tokens, hidden, top_k = at.grid[0], at.number("HIDDEN"), at.number("TOP_K")
    at.holds("results", WIDE, tokens * top_k * hidden)
    at.holds("experts", INT32, tokens * top_k)
    at.holds("shares", FLOAT32, tokens * top_k)
    at.holds("out", (at["results"].dtype,), tokens * hidden)
    at.require(at.grid[1] * at.number("BLOCK") >= hidden, "the grid does not reach a row's end")
    at.powers_of_two("BLOCK")


CONTRACTS = (
    _persistent_matmul,
    _fixed_matmul,
    _weight_only,
    _quantize_rows,
    _widen,
    _fp8_product,
    _choose_experts,
    _arrange_tiles,
    _expert_product,
    _sum_experts,
)
