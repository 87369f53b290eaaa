"""What the sampling kernels assume."""

import numpy as np

from tests.worker.device.launches import FLOAT32, INT32, INT64, Launch


def _rows(at: Launch) -> None:
    """Tables of DeviceRows."""
    at.holds("sampling", INT32, at.number("COLUMNS"))
    if "tokens" in at.arguments:
        at.holds("tokens", INT32, at.number("token_width"))


def _samples(at: Launch, count: int) -> None:
    """Rows and positions of the samples."""
    at.holds("samples", INT32, 2 * count)
    known = at.contents("samples")
    at.require(known is not None, "which rows are sampled, the host must have said")
    if "tokens" in at.arguments:
        at.within("samples (row)", 0, at["tokens"].shape[0], known[:, 0])
        # A sequence that is as long as the table is not written to: the step after it does not exist.
        at.within("samples (position)", 0, at.number("token_width") + 1, known[:, 1])
        # Nor is a row by samples at tokens that it has already.
        written = known[known[:, 1] < at.number("token_width")]
        at.require(len(np.unique(written, axis=0)) == len(written), "two samples have the same place")


def _tiles(at: Launch, count: int) -> None:
    """Logits of the samples, and what is known of their tiles."""
    at.holds("logits", FLOAT32, count * at.number("vocab"))
    at.holds("peaks", FLOAT32, count * at.number("num_tiles"))
    at.require(at.number("num_tiles") * at.number("TILE") >= at.number("vocab"), "tiles do not reach the last token")
    at.powers_of_two("TILE")


def _tile_peaks(at: Launch) -> None:
    runs, count = at.grid[:2]
    _rows(at)
    _samples(at, count)
    _tiles(at, count)
    at.holds("masses", FLOAT32, count * at.number("num_tiles"))
    at.require(runs * at.number("RUN") >= at.number("num_tiles"), "the grid does not reach the last tile")
    at.powers_of_two("RUN")


def _choose(at: Launch) -> None:
    count = at.grid[0]
    _rows(at)
    _samples(at, count)
    _tiles(at, count)
    at.holds("masses", FLOAT32, count * at.number("num_tiles"))
    at.holds("listed", INT32, count * at.number("num_tiles"))
    at.holds("highest_of", FLOAT32, count)
    at.holds("chosen", INT64, count)
    at.require(at.number("PADDED_TILES") >= at.number("num_tiles"), "a program does not see all tiles")
    at.powers_of_two("PADDED_TILES", "CUT_TILES", "DRAW_TILES")


def _draw(at: Launch) -> None:
    runs, count = at.grid[:2]
    _rows(at)
    _samples(at, count)
    _tiles(at, count)
    at.holds("highest_of", FLOAT32, count)
    at.holds("won", FLOAT32, runs * count)
    at.holds("best", INT32, runs * count)
    at.require(runs * at.number("RUN") >= at.number("num_tiles"), "the grid does not reach the last tile")
    at.powers_of_two("RUN")


def _pick(at: Launch) -> None:
    count, runs = at.grid[0], at.number("num_runs")
    at.holds("tokens", INT32, at.number("token_width"))
    _samples(at, count)
    at.holds("highest_of", FLOAT32, count)
    at.holds("won", FLOAT32, runs * count)
    at.holds("best", INT32, runs * count)
    at.holds("chosen", INT64, count)
    at.require(at.number("PADDED_RUNS") >= runs, "a program does not see all runs")
    at.powers_of_two("PADDED_RUNS")


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


def _exclude(at: Launch) -> None:
    count = at.grid[0]
    at.holds("logits", FLOAT32, at.number("vocab"))
    at.holds("rows", INT64, count)
    at.holds("words", INT32, count * at.number("num_words"))
    at.require(at.grid[1] * at.number("BLOCK") >= at.number("vocab"), "the grid does not reach the last token")
    known = at.contents("rows")
    at.require(known is not None, "which rows have masks, the host must have said")
    at.within("rows", 0, at["logits"].numel() // at.number("vocab"), known)
    at.require(len(np.unique(known)) == len(known), "two masks have the same row")
    at.powers_of_two("BLOCK")


def _tiles_of_logprobs(at: Launch, rows: int) -> None:
    """Logits, chosen tokens, and what is known of each tile."""
    tiles = at.number("num_tiles")
    at.holds("logits", FLOAT32, rows * at.number("vocab"))
    at.holds("chosen", INT64, rows)
    for name, kinds in (("peaks", FLOAT32), ("ids", INT32), ("masses", FLOAT32), ("above", INT32)):
        at.holds(name, kinds, rows * tiles)
    at.require(tiles * at.number("TILE") >= at.number("vocab"), "tiles do not reach the last token")
    at.powers_of_two("TILE")
    known = at.contents("chosen")
    if known is not None:
        at.within("chosen", -1, at.number("vocab"), known)


def _tile_logprobs(at: Launch) -> None:
    runs, rows = at.grid[:2]
    _tiles_of_logprobs(at, rows)
    at.require(runs * at.number("RUN") >= at.number("num_tiles"), "the grid does not reach the last tile")
    at.powers_of_two("RUN")


def _row_logprobs(at: Launch) -> None:
    rows, top = at.grid[0], at.number("num_top")
    _tiles_of_logprobs(at, rows)
    at.holds("logprob", FLOAT32, rows)
    at.holds("rank", INT32, rows)
    at.holds("top_ids", INT32, rows * top)
    at.holds("top_logprobs", FLOAT32, rows * top)
    at.require(top <= at.number("vocab"), "more than there are tokens")
    at.require(at.number("PADDED_TILES") >= at.number("num_tiles"), "a program does not see all tiles")
    at.powers_of_two("PADDED_TILES")


CONTRACTS = (
    _tile_peaks,
    _choose,
    _draw,
    _pick,
    _add_bias,
    _count_tokens,
    _penalise,
    _exclude,
    _tile_logprobs,
    _row_logprobs,
)
