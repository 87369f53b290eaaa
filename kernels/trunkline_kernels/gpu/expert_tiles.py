"""Sorts tokens by their experts and divides the tokens of each expert into tiles, on the device.

How many tokens an expert has never reaches the host. Grids are as large as the tiles can be many, so that captured
graphs can contain them, and the programs beyond the tiles in use return at once.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from trunkline_kernels.gpu.dependent_launch import launch_options, wait_for_inputs

FEW_PAIRS, MANY_PAIRS = 1024, 4096  # that a program looks at together: of a step with as few, and with more


@triton.jit(do_not_specialize=["num_pairs"])
def _arrange_tiles(
    experts,  # [num_pairs] int32; the number of experts or more: none
    tile_experts,  # [most tiles] int32 ←
    tile_pairs,  # [most tiles, TILE_ROWS] int32 ← -1 at the end of the last tile of an expert
    num_tiles,  # [1] int32 ←
    loads,  # [number of experts] int64: the pairs of each are added ←; not read unless COUNTED
    num_pairs,
    PADDED: tl.constexpr,  # the number of experts, padded to a power of two
    TILE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNTED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: (number of experts). Each program counts the pairs of all experts, and places those of its own.

    A pair keeps its order among those of its expert, so the same tokens always make the same tiles.
    """
    wait_for_inputs(DEPENDENT)
    expert, num_experts = tl.program_id(0), tl.num_programs(0)
    at, index = tl.arange(0, BLOCK), tl.arange(0, PADDED)
    counts = tl.zeros([PADDED], tl.int32)
    for start in tl.range(0, num_pairs, BLOCK):
        found = tl.load(experts + start + at, mask=start + at < num_pairs, other=num_experts)
        counts += tl.histogram(found, PADDED, mask=found < num_experts)
    tiles = tl.cdiv(counts, TILE_ROWS)
    if expert == 0:
        tl.store(num_tiles, tl.sum(tiles))
    first_tile = tl.sum(tl.where(index < expert, tiles, 0))
    own_tiles = tl.sum(tl.where(index == expert, tiles, 0))
    if own_tiles > 0:
        own_pairs = tile_pairs + first_tile * TILE_ROWS
        placed = tl.full([], 0, tl.int32)
        for start in tl.range(0, num_pairs, BLOCK):
            found = tl.load(experts + start + at, mask=start + at < num_pairs, other=num_experts)
            is_own = (found == expert).to(tl.int32)
            tl.store(own_pairs + placed + tl.cumsum(is_own, axis=0) - 1, start + at, mask=is_own != 0)
            placed += tl.sum(is_own)
        rest = placed + tl.arange(0, TILE_ROWS)
        tl.store(own_pairs + rest, -1, mask=rest < own_tiles * TILE_ROWS)
        for tile in tl.range(0, own_tiles):
            tl.store(tile_experts + first_tile + tile, expert)
        if COUNTED:
            tl.store(loads + expert, tl.load(loads + expert) + placed)


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """The tiles of a step. A pair is a token and one of its experts: token t and its expert k are t * top_k + k."""

    experts: Tensor  # [most tiles] int32: of each tile
    pairs: Tensor  # [most tiles, rows] int32: of each tile; -1: the tile has fewer
    num_tiles: Tensor  # [1] int32: tiles in use

    @classmethod
    def arrange(
        cls, experts: Tensor, *, num_experts: int, rows: int, loads: Tensor | None = None, dependent: bool = False
    ) -> "ExpertTiles":
        """Divides the pairs of a step into tiles of up to `rows` pairs with the same expert.

        experts: [num_tokens, top_k] int32; num_experts: none. rows: a power of two; dependent: see dependent_launch
        loads: [num_experts] int64, to which the pairs of each expert are added
        """
        num_pairs, device = experts.numel(), experts.device
        tiles = most_tiles(num_pairs, num_experts, rows)
        found = cls(
            *(torch.empty(shape, dtype=torch.int32, device=device) for shape in ((tiles,), (tiles, rows), (1,)))
        )
        if num_pairs:
            few = num_pairs <= FEW_PAIRS
            _arrange_tiles[(num_experts,)](
                experts, found.experts, found.pairs, found.num_tiles, experts if loads is None else loads, num_pairs,
                triton.next_power_of_2(num_experts), rows, FEW_PAIRS if few else MANY_PAIRS, loads is not None,
                dependent, num_warps=4 if few else 8, **launch_options(dependent),
            )  # fmt: skip
        return found


def most_tiles(num_pairs: int, num_experts: int, rows: int) -> int:
    """Returns the largest number of tiles that so many pairs can need: each expert has one that is not full."""
    used = min(num_pairs, num_experts)
    return used + (num_pairs - used) // rows
