"""What the kernels of device_rows assume, and those that look at each token by itself."""

import numpy as np

from tests.worker.device.launches import FLOAT32, INT32, INT64, MOST_ELEMENTS, WIDE, Launch, check_pool, check_scales


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
    if at["out"] is at["x"]:  # some columns of a tensor
        at.require(at["x"].dtype in WIDE and tuple(at["x"].shape) == (rows, dim), "rows of x")
        at.require(at["x"].stride() == (at.number("STRIDE"), 1), "STRIDE")
    else:
        at.require(at.number("STRIDE") == dim, f"x is not contiguous: STRIDE is {at.number('STRIDE')}")
        at.holds("x", WIDE, rows * dim)
        at.holds("out", kind, rows * dim)
    at.holds("weight", kind, dim)
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
    check_pool(at, kv_heads=kv_heads)
    at.holds("positions", INT64, tokens)
    at.holds("slots", INT64, tokens)
    for name in ("cos", "sin"):
        at.holds(name, FLOAT32, at.number("PAIRS"))
    at.require(0 <= at.number("PAIRS") <= half, "PAIRS")
    if at["NORM"]:
        at.holds("query_norm", kind, dim)
        at.holds("key_norm", kind, dim)
    check_scales(at, "key_scale", "value_scale")
    per_program = at.number("HEADS")
    groups = -(-heads // per_program) + 2 * -(-kv_heads // per_program)
    at.require(at.grid[1] == groups, f"{groups} groups of heads")
    at.require(at.number("PADDED_HALF") >= half, "PADDED_HALF")
    at.powers_of_two("PADDED_HALF", "HEADS")


CONTRACTS = (
    _write_segments,
    _step_inputs,
    _gather_rows,
    _rms_norm,
    _silu_and_mul,
    _rotary_kv,
)
