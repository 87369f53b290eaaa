"""The launchers of the attention kernels as tests call them. Memory that holds nothing is NaN."""

import itertools
import math

import numpy as np
import torch

from tests.kernels.attention_cases import naive
from trunkline_kernels.gpu.decode_attention import decode_attention
from trunkline_kernels.gpu.decode_plan import DecodePlan
from trunkline_kernels.gpu.decode_tiling import DecodeTiling
from trunkline_kernels.gpu.ragged_attention import Pieces, RaggedTiling, ragged_attention, split_tiles_of, tiles_of
from trunkline_kernels.gpu.shared_prefix import PrefixRoom, SharedPrefixes, shared_prefix
from trunkline_kernels.ragged_batch import KVLayer, RaggedBatch

TILING = RaggedTiling(rows=32, keys=32, warps=4, stages=1)


def attend(
    q: torch.Tensor,
    kv: KVLayer,
    batch: RaggedBatch,
    *,
    window: int | None = None,
    split: int = 0,
    tiling: RaggedTiling = TILING,
    padding_tiles: int = 0,
) -> torch.Tensor:
    group = q.shape[1] // kv.keys.shape[2]
    query_lens, context_lens = np.array(batch.query_lens, np.int32), np.array(batch.context_lens, np.int32)
    if split:
        found = split_tiles_of(query_lens, context_lens, tiling.tokens(group), split)
        pieces = Pieces.allocate(found.num_slots, q.shape[1], q.shape[2], torch.from_numpy(found.cut))
        for tensor in (pieces.partial_out, pieces.partial_stats):
            tensor.fill_(math.nan)
    else:
        found, pieces = tiles_of(query_lens, tiling.tokens(group)), None
    out = torch.full_like(q, math.nan)
    ragged_attention(
        q,
        kv,
        out,
        tiles=torch.nn.functional.pad(torch.from_numpy(found.tiles), (0, 0, 0, padding_tiles), value=-1),
        query_starts=torch.tensor([0, *itertools.accumulate(batch.query_lens)], dtype=torch.int32),
        context_lens=torch.from_numpy(context_lens),
        **shuffled(batch),
        tiling=tiling,
        scale=q.shape[2] ** -0.5,
        window=window,
        split=split,
        pieces=pieces,
    )
    return out


def shuffled(batch: RaggedBatch) -> dict[str, torch.Tensor]:
    """Block tables as they lie in the rows of the device: in another order, among others."""
    tables = batch.block_tables.int()
    count = len(tables)
    rows = torch.randperm(count + 2, generator=torch.Generator().manual_seed(count))[:count].int()
    scattered = torch.full((count + 2, tables.shape[1]), 10**6, dtype=torch.int32)
    scattered[rows.long()] = tables
    return {"rows": rows, "block_tables": scattered}


def decode(
    q: torch.Tensor,
    kv: KVLayer,
    batch: RaggedBatch,
    *,
    window: int | None = None,
    multiprocessors: int = 4,
    programs: int = 3,
    padding_rows: int = 0,
    shared: list[tuple[int, int, int]] | None = None,  # (first sequence, how many, tokens) of each shared prefix
    piece: int = 64,  # tokens of a prefix's piece
) -> torch.Tensor:
    heads, head_dim = q.shape[1:]
    plan = DecodePlan.allocate(
        max_seqs=len(q) + padding_rows + 3,
        num_heads=heads,
        num_kv_heads=kv.keys.shape[2],
        head_dim=head_dim,
        num_multiprocessors=multiprocessors,
        tiling=DecodeTiling(keys=32, warps=4, stages=1, programs=programs, shortest=64),
        device=q.device,
        windows=[window, 7],
    )
    tile_seqs = TILING.tokens(heads // kv.keys.shape[2])
    where = shuffled(batch)
    count = len(q) + padding_rows
    of_sequence = np.zeros((count, 3), np.int32)
    tiles: list[tuple[int, int, int, int, int]] = []
    for first, members, tokens in shared or []:
        for start in range(first, first + members, tile_seqs):
            size = min(tile_seqs, first + members - start)
            of_sequence[start : start + size] = tokens, len(tiles), -(-tokens // piece)
            tiles += [
                (int(where["rows"][first]), start, size, at, min(at + piece, tokens)) for at in range(0, tokens, piece)
            ]
    room = PrefixRoom.allocate(
        num_tiles=len(tiles) + 2, tile_seqs=tile_seqs, num_heads=heads, head_dim=head_dim, device=q.device
    )
    for tensor in (plan.partial_out, plan.partial_stats, room.partial_out, room.partial_stats):
        tensor.fill_(math.nan)
    prefixes = SharedPrefixes(
        torch.tensor([*tiles, (-1, 0, 0, 0, 0)] if shared else [], dtype=torch.int32).view(-1, 5),
        torch.from_numpy(of_sequence),
        room,
    )
    context_lens = torch.tensor([*batch.context_lens, *[0] * padding_rows], dtype=torch.int32)
    where["rows"] = torch.nn.functional.pad(where["rows"], (0, padding_rows))
    padded = torch.nn.functional.pad(q, (0, 0, 0, 0, 0, padding_rows), value=math.nan)
    out = torch.full_like(padded, math.nan)
    plan.update(context_lens, prefixes.of_sequence)
    shared_prefix(
        padded,
        kv,
        prefixes,
        block_tables=where["block_tables"],
        tiling=TILING,
        scale=q.shape[2] ** -0.5,
    )
    decode_attention(
        padded, kv, out, context_lens=context_lens, rows=where["rows"], block_tables=where["block_tables"],
        plan=plan, prefixes=prefixes, scale=q.shape[2] ** -0.5, window=window,
    )  # fmt: skip
    assert out[len(q) :].isnan().all()
    assert not plan.arrivals.any(), "the next layer counts from zero"
    return out[: len(q)]


def truth_of(
    q: torch.Tensor,
    batch: RaggedBatch,
    truth: list[tuple[torch.Tensor, torch.Tensor]],
    window: int | None = None,
) -> torch.Tensor:
    parts, row = [], 0
    for (k, v), length, context in zip(truth, batch.query_lens, batch.context_lens, strict=True):
        parts.append(naive(q[row : row + length], k, v, context - length, window))
        row += length
    return torch.cat(parts).float()
