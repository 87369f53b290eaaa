"""What the attention kernels assume."""

import numpy as np

from tests.worker.device.launches import FLOAT32, INT32, WIDE, Launch, check_pool, check_scales


def _attention(at: Launch, kv_heads: int, tables: str = "block_tables") -> int:
    """What every attention kernel reads; → elements of one token's queries"""
    dim, heads = at.number("HEAD_DIM"), at.number("num_heads")
    at.require(kv_heads * at.number("GROUP") == heads, f"{heads} heads in groups of {at.number('GROUP')}")
    at.require(at.number("slot_stride") == kv_heads * dim, "slot_stride")
    at.holds("q", WIDE, 0)
    check_pool(at, kv_heads=kv_heads)
    at.holds(tables, INT32, at.number("table_stride"))
    at.require(at[tables].shape[1] == at.number("table_stride"), "table_stride")
    at.require(at.number("PADDED_DIM") >= max(16, dim), "PADDED_DIM")
    at.require(at.number("TILE_ROWS") >= max(16, at.number("GROUP")), "TILE_ROWS")
    at.require(at.number("TILE_KEYS") >= 16, "TILE_KEYS")
    at.powers_of_two("PADDED_DIM", "TILE_ROWS", "TILE_KEYS")
    check_scales(at, *(name for name in ("key_scale", "value_scale") if name in at.arguments))
    return heads * dim


def _ragged_attention(at: Launch) -> None:
    tiles, kv_heads = at["tiles"].shape[0], at.number("num_heads") // at.number("GROUP")
    width = _attention(at, kv_heads)
    at.require(at.grid == (tiles * kv_heads,), f"{tiles} tiles of {kv_heads} heads")
    heads, seqs = at.number("num_heads"), len(at["context_lens"])
    tokens = at["q"].numel() // width
    at.holds("out", (at["q"].dtype,), tokens * width)
    at.holds("tiles", INT32, 4 * tiles)
    at.holds("query_starts", INT32, seqs + 1)
    at.holds("context_lens", INT32, seqs)
    at.holds("rows_of", INT32, seqs)
    split = at.number("SPLIT")
    slots = 0
    if split:
        at.require(split % at.number("TILE_KEYS") == 0, "SPLIT")
        slots = at["partial_stats"].numel() // (2 * heads)
        at.holds("partial_out", FLOAT32, slots * width)
        at.holds("partial_stats", FLOAT32, slots * heads * 2)
    known, starts, contexts, rows = (at.contents(name) for name in ("tiles", "query_starts", "context_lens", "rows_of"))
    if known is None or starts is None or contexts is None or rows is None:
        return
    at.within("query_starts", 0, tokens + 1, starts)
    real = known[known[:, 0] >= 0]
    at.within("tiles (sequence)", 0, seqs, real[:, 0])
    at.within("rows_of", 0, at["block_tables"].shape[0], rows)
    counts = np.diff(starts)[real[:, 0]]
    tile_tokens = at.number("TILE_ROWS") // at.number("GROUP")
    at.require(bool((real[:, 1] < counts).all()), "a tile begins behind its sequence's last new token")
    at.require(bool((real[:, 1] > -tile_tokens).all()), "a tile ends before its sequence's first new token")
    at.require(bool((contexts[real[:, 0]] >= counts).all()), "a context is shorter than its new tokens")
    at.within("tiles (slot)", -1, max(slots, 0), real[:, 3])
    own = real[real[:, 3] >= 0][:, 3]
    at.require(len(set(own.tolist())) == len(own), "two pieces have the same slot")
    at.require(bool(split) or not len(own), "pieces, but no SPLIT")


def _merge_split(at: Launch) -> None:
    heads, cut, dim = at.grid[0], at.grid[1], at.number("HEAD_DIM")
    at.require(at.number("num_heads") == heads, "one program for each head")
    slots = at["partial_stats"].numel() // (2 * heads)
    at.holds("out", WIDE, heads * dim)
    at.holds("cut", INT32, 3 * cut)
    at.holds("partial_out", FLOAT32, slots * heads * dim)
    at.holds("partial_stats", FLOAT32, slots * heads * 2)
    at.powers_of_two("PADDED_DIM")
    check_scales(at, "value_scale")
    known = at.contents("cut")
    if known is None:
        return
    real = known[known[:, 2] > 0]
    at.within("cut (row)", 0, at["out"].numel() // (heads * dim), real[:, 0])
    at.within("cut (slots)", 0, slots + 1, np.concatenate([real[:, 1], real[:, 1] + real[:, 2]]))


def _plan_ranges(at: Launch) -> None:
    seqs, ranges = at.number("num_seqs"), at.number("most_ranges")
    at.require(at.grid == (1 + ranges,), f"{ranges} ranges")
    at.require(seqs > 0 and ranges > 0, "no sequence, or no range")
    at.holds("context_lens", INT32, seqs)
    at.holds("prefixes", INT32, 3 * seqs)
    at.holds("tile_starts", INT32, seqs)
    at.holds("pieces", INT32, 2 * seqs)
    at.holds("ranges", INT32, 4 * ranges)
    at.require(at.number("PADDED_SEQS") >= seqs, "PADDED_SEQS")
    at.require(at.number("FEWEST_TILES") > 0, "FEWEST_TILES")
    at.powers_of_two("PADDED_SEQS", "TILE_KEYS")
    contexts, prefixes = at.contents("context_lens"), at.contents("prefixes")
    if contexts is not None and prefixes is not None:
        # Without a tile of its own, a sequence would have no program that merges its prefix.
        fits = (prefixes[:, 0] < contexts) | (prefixes[:, 0] == 0)
        at.require(bool(fits.all()), "a prefix is not shorter than its context")


def _attend_ranges(at: Launch) -> None:
    width = _attention(at, at.grid[0])
    heads, ranges, seqs = at.number("num_heads"), at.grid[1], len(at["context_lens"])
    at.holds("q", WIDE, seqs * width)
    at.holds("out", (at["q"].dtype,), seqs * width)
    at.holds("partial_out", FLOAT32, (seqs + ranges) * width)
    at.holds("partial_stats", FLOAT32, (seqs + ranges) * heads * 2)
    at.holds("rows_of", INT32, seqs)
    at.holds("context_lens", INT32, seqs)
    at.holds("prefixes", INT32, 3 * seqs)
    at.holds("tile_starts", INT32, seqs)
    at.holds("pieces", INT32, 2 * seqs)
    at.holds("ranges", INT32, 4 * ranges)
    at.holds("arrivals", INT32, seqs * at.grid[0])
    at.require(at.number("HEADS") >= at.number("GROUP"), "HEADS")
    at.powers_of_two("HEADS", "TILE_PIECES")
    _check_prefixes(at, seqs, width)
    contexts, rows = at.contents("context_lens"), at.contents("rows_of")
    if contexts is not None:
        at.within("context_lens", 0, at.number("table_stride") * at.number("BLOCK_SIZE") + 1, contexts)
    if rows is not None:
        at.within("rows_of", 0, at["block_tables"].shape[0], rows)


def _check_prefixes(at: Launch, seqs: int, width: int) -> None:
    """Where shared_prefix has left its results."""
    heads, tiles, rows = at.number("num_heads"), len(at["prefix_tiles"]), at.number("PREFIX_ROWS")
    at.require(bool(at["SHARED"]) == (tiles > 0), f"SHARED with {tiles} tiles of prefixes")
    at.holds("prefix_tiles", INT32, 5 * tiles)
    at.holds("prefix_out", FLOAT32, tiles * rows * width)
    at.holds("prefix_stats", FLOAT32, tiles * rows * heads * 2)
    prefixes, known = at.contents("prefixes"), at.contents("prefix_tiles")
    if prefixes is None:
        return
    sharing = prefixes[prefixes[:, 2] > 0]
    at.require(bool((prefixes[prefixes[:, 0] > 0, 2] > 0).all()), "a shared prefix without a result")
    at.within("prefixes (tiles)", 0, tiles + 1, np.concatenate([sharing[:, 1], sharing[:, 1] + sharing[:, 2]]))
    if known is not None:
        member = np.flatnonzero(prefixes[:, 2] > 0) - known[sharing[:, 1], 1]
        at.within("prefix_tiles (first sequence)", 0, rows, member)


def _attend_prefix(at: Launch) -> None:
    width = _attention(at, at.grid[0])
    heads, tiles = at.number("num_heads"), at.grid[1]
    tile_seqs = at.number("TILE_ROWS") // at.number("GROUP")
    at.holds("tiles", INT32, 5 * tiles)
    at.holds("partial_out", FLOAT32, tiles * tile_seqs * width)
    at.holds("partial_stats", FLOAT32, tiles * tile_seqs * heads * 2)
    known = at.contents("tiles")
    if known is None:
        return
    real = known[known[:, 0] >= 0]
    at.within("tiles (row)", 0, at["block_tables"].shape[0], real[:, 0])
    at.within(
        "tiles (sequences)", 0, at["q"].numel() // width + 1, np.concatenate([real[:, 1], real[:, 1] + real[:, 2]])
    )
    at.within("tiles (number of sequences)", 1, tile_seqs + 1, real[:, 2])
    at.require(bool((real[:, 3] < real[:, 4]).all()), "a tile without tokens")
    at.within("tiles (end)", 0, at.number("table_stride") * at.number("BLOCK_SIZE") + 1, real[:, 4])


def _text_attention(at: Launch) -> None:
    tiles, heads, dim = at["tiles"].shape[0], at.number("num_heads"), at.number("HEAD_DIM")
    tokens = at["q"].shape[0]
    at.require(at.grid == (tiles, heads), f"{tiles} tiles of {heads} heads")
    for name in ("q", "k", "v"):
        at.require(at[name].dtype in WIDE, f"{name} is {at[name].dtype}")
        at.require(tuple(at[name].shape) == (tokens, heads, dim), f"{name} is {tuple(at[name].shape)}")
        at.require(at[name].stride() == (at.number(f"{name}_stride"), dim, 1), f"strides of {name}")
    at.holds("out", (at["q"].dtype,), tokens * heads * dim)
    at.holds("tiles", INT32, 3 * tiles)
    at.require(at.number("window") >= 0, "window")
    at.require(at.number("PADDED_DIM") >= max(16, dim), "PADDED_DIM")
    at.powers_of_two("PADDED_DIM", "TILE_ROWS", "TILE_KEYS")
    known = at.contents("tiles")
    if known is not None:
        at.within("tiles (first token)", 0, tokens, known[:, 1])
        at.within("tiles (end)", 1, tokens + 1, known[:, 2])
        at.require(bool(((known[:, 1] <= known[:, 0]) & (known[:, 0] < known[:, 2])).all()), "a tile outside its text")


CONTRACTS = (
    _text_attention,
    _ragged_attention,
    _merge_split,
    _plan_ranges,
    _attend_ranges,
    _attend_prefix,
)
