"""What each Triton kernel assumes of its arguments: types, sizes, and the numbers that the host puts into its tables.

A contract is named like its kernel. It is checked at every launch, and knows no more than the kernel's own comments.
"""

from collections.abc import Callable

import numpy as np
import torch

from tests.worker.device.launches import Launch

INT32, INT64, FLOAT32 = (torch.int32,), (torch.int64,), (torch.float32,)
WIDE = (torch.float32, torch.bfloat16, torch.float16)
POOL = (*WIDE, torch.float8_e4m3fn)
MOST_ELEMENTS = 1 << 20  # of one tensor in a kernel: Triton's limit

Contract = Callable[[Launch], None]


def _write_segments(at: Launch) -> None:
    segments = at["segments"].shape[0]
    at.require(at.grid[0] == segments, f"{segments} segments")
    at.holds("target", INT32, at.number("width"))
    at.holds("segments", INT32, 4 * segments)
    at.holds("data", INT32, 0)
    at.powers_of_two("BLOCK")
    known = at.contents("segments")
    at.require(known is not None, "what the segments are, the host must have said")
    row, first, count, source = known.T
    at.within("segments (row)", 0, at["target"].shape[0], row)
    at.within("segments (columns)", 0, at.number("width") + 1, np.concatenate([first, first + count]))
    at.within("segments (data)", 0, len(at["data"]) + 1, np.concatenate([source, source + count]))
    at.require(count.max() <= at.grid[1] * at.number("BLOCK"), f"a segment of {count.max()} is longer than the grid")


def _step_inputs(at: Launch) -> None:
    seqs, tokens, block = at.number("num_seqs"), at.number("num_tokens"), at.number("BLOCK")
    at.require(at.grid[0] == seqs + 1, f"{seqs} sequences")
    at.holds("tokens", INT32, at.number("token_width"))
    at.holds("tables", INT32, at.number("table_width"))
    at.holds("query_starts", INT32, seqs + 1)
    at.holds("context_lens", INT32, seqs)
    at.holds("rows", INT32, seqs)
    for name in ("token_ids", "positions", "slots"):
        at.holds(name, INT64, tokens)
    at.powers_of_two("BLOCK")
    starts, contexts, rows = (at.contents(name) for name in ("query_starts", "context_lens", "rows"))
    if starts is None or contexts is None or rows is None:
        return
    counts = np.diff(starts)
    at.within("query_starts", 0, tokens + 1, starts)
    at.require(bool((counts >= 0).all()), "query_starts fall")
    most = max(counts.max(initial=0), tokens - int(starts[-1]))
    at.require(most <= at.grid[1] * block, f"a sequence, or the padding, has {most} tokens: more than the grid")
    real = counts > 0
    at.require(bool((contexts[real] >= counts[real]).all()), "a context is shorter than its new tokens")
    at.within("context_lens", 0, at.number("token_width") + 1, contexts)
    at.within("context_lens (blocks)", 0, at.number("table_width") * at.number("BLOCK_SIZE") + 1, contexts)
    at.within("rows", 0, at["tokens"].shape[0], rows)
    at.require(len(set(rows[real].tolist())) == real.sum(), "two sequences of a step have the same row")


def _gather_rows(at: Launch) -> None:
    rows, dim = at.grid[0], at.number("DIM")
    at.holds("source", WIDE, dim)
    at.holds("index", (*INT32, *INT64), rows)
    at.holds("out", (at["source"].dtype,), rows * dim)
    at.require(at.grid[1] * at.number("BLOCK") >= dim, "the grid does not reach a row's end")
    at.powers_of_two("BLOCK")
    known = at.contents("index")
    if known is not None:
        at.within("index", 0, at["source"].numel() // dim, known)


def _rms_norm(at: Launch) -> None:
    rows, dim = at.grid[0], at.number("DIM")
    kind = (at["x"].dtype,)
    at.holds("x", WIDE, rows * dim)
    at.holds("weight", kind, dim)
    at.holds("out", kind, rows * dim)
    if at["ADD"]:
        at.holds("residual", kind, rows * dim)
    at.powers_of_two("PADDED")
    at.require(dim <= at.number("PADDED") <= MOST_ELEMENTS, "PADDED")


def _silu_and_mul(at: Launch) -> None:
    rows, dim = at.grid[0], at.number("DIM")
    at.holds("gate_up", WIDE, 2 * rows * dim)
    at.holds("out", (at["gate_up"].dtype,), rows * dim)
    at.require(at.grid[1] * at.number("BLOCK") >= dim, "the grid does not reach a row's end")
    at.powers_of_two("BLOCK")


def _rotary_kv(at: Launch) -> None:
    tokens, half = at.grid[0], at.number("HEAD_DIM") // 2
    heads, kv_heads, dim = at.number("NUM_HEADS"), at.number("NUM_KV_HEADS"), at.number("HEAD_DIM")
    kind = (at["qkv"].dtype,)
    at.holds("qkv", WIDE, tokens * (heads + 2 * kv_heads) * dim)
    at.holds("q_out", kind, tokens * heads * dim)
    at.holds("keys", POOL, kv_heads * dim)
    at.holds("values", (at["keys"].dtype,), at["keys"].numel())
    at.holds("positions", INT64, tokens)
    at.holds("slots", INT64, tokens)
    for name in ("cos", "sin"):
        at.holds(name, FLOAT32, half)
    if at["NORM"]:
        at.holds("query_norm", kind, dim)
        at.holds("key_norm", kind, dim)
    _scales(at, "key_scale", "value_scale")
    per_program = at.number("HEADS")
    groups = -(-heads // per_program) + 2 * -(-kv_heads // per_program)
    at.require(at.grid[1] == groups, f"{groups} groups of heads")
    at.require(at.number("PADDED_HALF") >= half, "PADDED_HALF")
    at.powers_of_two("PADDED_HALF", "HEADS")


def _scales(at: Launch, *names: str) -> None:
    """The pool holds 8-bit numbers exactly where there are scales."""
    keys = at.arguments.get("keys")
    if keys is not None:
        at.require(bool(at["SCALED"]) == (keys.dtype == torch.float8_e4m3fn), f"SCALED with keys of {keys.dtype}")
    if at["SCALED"]:
        for name in names:
            at.holds(name, FLOAT32, 1)


def _attention(at: Launch, kv_heads: int, tables: str = "block_tables") -> int:
    """What every attention kernel reads; → elements of one token's queries"""
    dim, heads = at.number("HEAD_DIM"), at.number("num_heads")
    at.require(kv_heads * at.number("GROUP") == heads, f"{heads} heads in groups of {at.number('GROUP')}")
    at.require(at.number("slot_stride") == kv_heads * dim, "slot_stride")
    at.holds("q", WIDE, 0)
    at.holds("keys", POOL, at.number("BLOCK_SIZE") * kv_heads * dim)
    at.holds("values", (at["keys"].dtype,), at["keys"].numel())
    at.holds(tables, INT32, at.number("table_stride"))
    at.require(tuple(at["keys"].shape[1:]) == (at.number("BLOCK_SIZE"), kv_heads, dim), "the pool's shape")
    at.require(at[tables].shape[1] == at.number("table_stride"), "table_stride")
    at.require(at.number("PADDED_DIM") >= max(16, dim), "PADDED_DIM")
    at.require(at.number("TILE_ROWS") >= max(16, at.number("GROUP")), "TILE_ROWS")
    at.require(at.number("TILE_KEYS") >= 16, "TILE_KEYS")
    at.powers_of_two("PADDED_DIM", "TILE_ROWS", "TILE_KEYS")
    _scales(at, *(name for name in ("key_scale", "value_scale") if name in at.arguments))
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
    at.require(bool((real[:, 1] == np.trunc(real[:, 1])).all()), "tiles")
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
    _scales(at, "value_scale")
    known = at.contents("cut")
    if known is None:
        return
    real = known[known[:, 2] > 0]
    at.within("cut (row)", 0, at["out"].numel() // (heads * dim), real[:, 0])
    at.within("cut (slots)", 0, slots + 1, np.concatenate([real[:, 1], real[:, 1] + real[:, 2]]))


def _plan_pieces(at: Launch) -> None:
    seqs = at.number("num_seqs")
    at.require(at.grid == (seqs + 1,), f"{seqs} sequences")
    at.holds("context_lens", INT32, seqs)
    at.holds("prefixes", INT32, 3 * seqs)
    at.holds("piece_sequences", INT32, at.number("num_slots"))
    at.holds("piece_starts", INT32, seqs + 1)
    at.holds("piece_len", INT32, 1)
    at.require(at.number("num_slots") >= seqs + at.number("extra"), "fewer slots than there may be pieces")
    at.require(at.number("PADDED_SEQS") >= seqs, "PADDED_SEQS")
    at.require(at.number("extra") > 0, "extra")
    at.powers_of_two("PADDED_SEQS", "CHUNK")
    contexts, prefixes = at.contents("context_lens"), at.contents("prefixes")
    if contexts is not None and prefixes is not None:
        at.require(bool((prefixes[:, 0] <= contexts).all()), "a prefix is longer than its context")


def _attend_pieces(at: Launch) -> None:
    width = _attention(at, at.grid[0])
    heads, pieces, seqs = at.number("num_heads"), at.grid[1], len(at["context_lens"])
    at.holds("q", WIDE, seqs * width)
    at.holds("out", (at["q"].dtype,), seqs * width)
    at.holds("partial_out", FLOAT32, pieces * width)
    at.holds("partial_stats", FLOAT32, pieces * heads * 2)
    at.holds("rows_of", INT32, seqs)
    at.holds("context_lens", INT32, seqs)
    at.holds("prefixes", INT32, 3 * seqs)
    at.holds("piece_sequences", INT32, pieces)
    at.holds("piece_starts", INT32, seqs + 1)
    at.holds("piece_len", INT32, 1)
    contexts, rows = at.contents("context_lens"), at.contents("rows_of")
    if contexts is not None:
        at.within("context_lens", 0, at.number("table_stride") * at.number("BLOCK_SIZE") + 1, contexts)
    if rows is not None:
        at.within("rows_of", 0, at["block_tables"].shape[0], rows)


def _merge_pieces(at: Launch) -> None:
    heads, seqs, dim = at.grid[0], at.grid[1], at.number("HEAD_DIM")
    at.require(at.number("num_heads") == heads, "one program for each head")
    at.holds("out", WIDE, seqs * heads * dim)
    at.holds("piece_starts", INT32, seqs + 1)
    at.holds("partial_out", FLOAT32, heads * dim)
    at.holds("partial_stats", FLOAT32, at["partial_out"].numel() // dim * 2)
    at.holds("prefixes", INT32, 3 * seqs)
    tiles = len(at["prefix_tiles"])
    at.holds("prefix_tiles", INT32, 5 * tiles)
    at.holds("prefix_out", FLOAT32, tiles * at.number("PREFIX_ROWS") * heads * dim)
    at.holds("prefix_stats", FLOAT32, tiles * at.number("PREFIX_ROWS") * heads * 2)
    at.powers_of_two("PADDED_DIM", "TILE_PIECES")
    _scales(at, "value_scale")
    prefixes, known = at.contents("prefixes"), at.contents("prefix_tiles")
    if prefixes is not None:
        sharing = prefixes[prefixes[:, 2] > 0]
        at.within("prefixes (tiles)", 0, tiles + 1, np.concatenate([sharing[:, 1], sharing[:, 1] + sharing[:, 2]]))
        if known is not None:
            member = np.flatnonzero(prefixes[:, 2] > 0) - known[sharing[:, 1], 1]
            at.within("prefix_tiles (first sequence)", 0, at.number("PREFIX_ROWS"), member)


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


def _fixed_matmul(at: Launch) -> None:
    _product(at, at["weight"].dtype)
    rows, columns = at.number("num_rows"), at.number("num_columns")
    at.holds("weight", (at["x"].dtype,), columns * at.number("INNER"))
    tiles = -(-rows // at.number("TILE_ROWS")) * -(-columns // at.number("TILE_COLUMNS"))
    at.require(at.grid == (tiles,), f"{tiles} tiles")
    at.powers_of_two("TILE_INNER")


def _product(at: Launch, kind: torch.dtype) -> None:
    rows, columns = at.number("num_rows"), at.number("num_columns")
    at.holds("x", (*WIDE, torch.float8_e4m3fn), rows * at.number("INNER"))
    at.holds("out", WIDE, rows * columns)
    if at["BIAS"]:
        at.holds("bias", WIDE, columns)
    at.powers_of_two("TILE_ROWS", "TILE_COLUMNS")


def _weight_only(at: Launch) -> None:
    columns, inner = at.number("num_columns"), at.number("INNER")
    _product(at, at["x"].dtype)
    if at["FOUR_BITS"]:
        at.require(inner % at.number("GROUP") == 0, f"groups of {at.number('GROUP')} in {inner}")
        at.holds("weight", (torch.uint8,), columns * inner // 2)
        at.holds("scale", FLOAT32, columns * inner // at.number("GROUP"))
        at.require(at.number("GROUP") % (2 * at.number("HALF")) == 0, "HALF")
    else:
        at.holds("weight", (torch.int8,), columns * inner)
        at.holds("scale", FLOAT32, columns)
    at.powers_of_two("HALF")
    _tiled(at)


def _tiled(at: Launch) -> None:
    columns, rows = (
        -(-at.number(count) // at.number(tile))
        for count, tile in (("num_columns", "TILE_COLUMNS"), ("num_rows", "TILE_ROWS"))
    )
    at.require(at.grid == (columns, rows), f"{columns} x {rows} tiles")


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


def _rows(at: Launch) -> None:
    """Tables of DeviceRows."""
    at.holds("sampling", INT32, at.number("COLUMNS"))
    if "tokens" in at.arguments:
        at.holds("tokens", INT32, at.number("token_width"))


def _sample(at: Launch) -> None:
    samples = at.grid[0]
    _rows(at)
    at.holds("logits", FLOAT32, samples * at.number("vocab"))
    at.holds("chosen", INT64, samples)
    at.holds("samples", INT32, 2 * samples)
    at.powers_of_two("BLOCK", "WIDE")
    known = at.contents("samples")
    at.require(known is not None, "which rows are sampled, the host must have said")
    at.within("samples (row)", 0, at["tokens"].shape[0], known[:, 0])
    at.require(len(set(known[:, 0].tolist())) == samples, "two samples have the same row")
    # A sequence that is as long as the table is not written to: the step after it does not exist.
    at.within("samples (position)", 0, at.number("token_width") + 1, known[:, 1])


def _add_bias(at: Launch) -> None:
    entries = at.number("num_entries")
    at.require(at.grid[0] * at.number("BLOCK") >= entries, "the grid does not reach the last entry")
    at.holds("logits", FLOAT32, at.number("vocab"))
    for name, kinds in (("rows", INT32), ("ids", INT32), ("bias", FLOAT32)):
        at.holds(name, kinds, entries)
    rows, ids = at.contents("rows"), at.contents("ids")
    at.require(rows is not None and ids is not None, "what the entries are, the host must have said")
    at.within("rows", 0, at["logits"].numel() // at.number("vocab"), rows)
    at.within("ids", 0, at.number("vocab"), ids)
    pairs = rows.astype(np.int64) * at.number("vocab") + ids
    at.require(len(np.unique(pairs)) == len(pairs), "two entries have the same place")
    at.powers_of_two("BLOCK")


def _penalised(at: Launch) -> None:
    count = at.grid[0]
    at.holds("counts", INT32, count * at.number("vocab"))
    at.holds("penalised", INT32, 3 * count)
    _rows(at)
    at.powers_of_two("BLOCK")


def _count_tokens(at: Launch) -> None:
    _penalised(at)
    known = at.contents("penalised")
    at.require(known is not None, "who is penalised, the host must have said")
    at.within("penalised (row)", 0, at["tokens"].shape[0], known[:, 1])
    at.within("penalised (tokens)", 0, at.number("token_width") + 1, known[:, 2])
    at.require(known[:, 2].max() <= at.grid[1] * at.number("BLOCK"), "a history is longer than the grid")


def _penalise(at: Launch) -> None:
    _penalised(at)
    at.holds("logits", FLOAT32, at.number("vocab"))
    at.require(at.grid[1] * at.number("BLOCK") >= at.number("vocab"), "the grid does not reach the last token")
    known = at.contents("penalised")
    if known is not None:
        at.within("penalised (row of logits)", 0, at["logits"].numel() // at.number("vocab"), known[:, 0])


def _logprobs(at: Launch) -> None:
    rows, top = at.grid[0], at.number("num_top")
    at.holds("logits", FLOAT32, rows * at.number("vocab"))
    at.holds("chosen", INT64, rows)
    at.holds("logprob", FLOAT32, rows)
    at.holds("rank", INT32, rows)
    at.holds("top_ids", INT32, rows * top)
    at.holds("top_logprobs", FLOAT32, rows * top)
    at.require(top <= at.number("vocab"), "more than there are tokens")
    at.powers_of_two("WIDE")
    known = at.contents("chosen")
    if known is not None:
        at.within("chosen", -1, at.number("vocab"), known)


CONTRACTS: dict[str, Contract] = {
    contract.__name__: contract
    for contract in (
        _write_segments, _step_inputs, _gather_rows, _rms_norm, _silu_and_mul, _rotary_kv, _ragged_attention,
        _merge_split, _plan_pieces, _attend_pieces, _merge_pieces, _attend_prefix, _fixed_matmul, _weight_only,
        _quantize_rows, _fp8_product, _sample, _add_bias, _count_tokens, _penalise, _logprobs,
    )
}  # fmt: skip
# Kernels of which a captured graph may launch more programs than a step needs: they look at the step's own numbers.
MAY_EXCEED = frozenset({"_step_inputs"})


def check(launch: Launch) -> None:
    """Raises LaunchFault."""
    contract = CONTRACTS.get(launch.name)
    if contract is None:
        raise launch.fault("this kernel has no contract")
    contract(launch)
