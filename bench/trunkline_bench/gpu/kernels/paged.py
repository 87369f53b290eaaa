"""Sequences in a paged KV pool, for measurements of attention."""

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trunkline_bench.gpu.shapes import Shapes
from trunkline_kernels.gpu.decode_attention import decode_attention
from trunkline_kernels.gpu.decode_plan import DecodePlan
from trunkline_kernels.gpu.decode_tiling import DecodeTiling, decode_tiling_for
from trunkline_kernels.gpu.prompt_attention import FreshPrompts, prompt_attention
from trunkline_kernels.gpu.ragged_attention import (
    SPLIT,
    Pieces,
    RaggedTiling,
    ragged_attention,
    split_tiles_of,
    tiles_of,
    tiling_for,
)
from trunkline_kernels.gpu.shared_prefix import PrefixRoom, SharedPrefixes, shared_prefix
from trunkline_kernels.ragged_batch import KVLayer, allocate_kv
from trunkline_worker.model.gpu_decoder import Chip
from trunkline_worker.runner.gpu.prefix_groups import PrefixGroup, prefix_tiles
from trunkline_worker.runner.gpu.row_table import TableRow
from trunkline_worker.runner.gpu.step_inputs import PREFIX_ALIGNMENT
from trunkline_worker.step.plan import Sampling


@dataclass(frozen=True, slots=True)
class Paged:
    """Random keys and values of sequences whose blocks are scattered over a pool."""

    kv: KVLayer
    block_tables: Tensor  # [num_seqs, max_blocks] int32
    context_lens: list[int]

    @classmethod
    def make(
        cls,
        shapes: Shapes,
        context_lens: list[int],
        dtype: torch.dtype | None = None,
        *,
        shared: int = 0,
        num_layers: int = 1,
    ) -> "Paged":
        """shared: number of first tokens whose blocks all sequences share; a multiple of the block size
        num_layers: of the pool, of which the middle one is used"""
        counts = [-(-context // shapes.block_size) for context in context_lens]
        kv = allocate_kv(
            num_layers=num_layers, num_blocks=sum(counts), block_size=shapes.block_size,
            num_kv_heads=shapes.num_kv_heads, head_dim=shapes.head_dim, dtype=dtype or shapes.dtype,
            device=shapes.device,
        ).layers[num_layers // 2]  # fmt: skip
        for pool in (kv.keys, kv.values):
            pool.copy_(torch.randn(pool.shape, dtype=shapes.dtype, device=shapes.device))
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).int()
        tables = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        for row, (count, end) in enumerate(zip(counts, itertools.accumulate(counts), strict=True)):
            tables[row, :count] = order[end - count : end]
        tables[:, : shared // shapes.block_size] = tables[0, : shared // shapes.block_size]
        return cls(kv, tables.to(shapes.device), context_lens)

    def contiguous(self, row: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one sequence, each [num_kv_heads, context, head_dim]."""
        context = self.context_lens[row]
        blocks = self.block_tables[row].long()
        keys, values = (pool[blocks].flatten(0, 1)[:context].transpose(0, 1) for pool in (self.kv.keys, self.kv.values))
        return keys, values

    def read_bytes(self) -> int:
        """Bytes of all keys and values, each read once."""
        return 2 * sum(self.context_lens) * self.kv.keys[0, 0].numel() * self.kv.keys.dtype.itemsize


class Decode:
    """A callable that runs decode_attention over all sequences and returns [sequences, heads, dim].

    shared: number of first tokens whose blocks are shared, and read once
    tiling: None: the engine's choice
    """

    def __init__(self, shapes: Shapes, paged: Paged, *, shared: int = 0, tiling: DecodeTiling | None = None) -> None:
        count = len(paged.context_lens)
        self.q = torch.randn(count, shapes.num_heads, shapes.head_dim, device=shapes.device, dtype=shapes.dtype)
        self.out = torch.empty_like(self.q)
        self._paged, self._scale = paged, shapes.head_dim**-0.5
        self._context_lens = torch.tensor(paged.context_lens, dtype=torch.int32, device=shapes.device)
        chip = Chip.of(shapes.device)
        group = shapes.num_heads // shapes.num_kv_heads
        kv_dtype = paged.kv.keys.dtype
        self.tiling = tiling or decode_tiling_for(
            head_dim=shapes.head_dim, group=group, shared_memory=chip.shared_memory, dtype=shapes.dtype,
            kv_dtype=kv_dtype, device=chip.name,
        )  # fmt: skip
        self._plan = DecodePlan.allocate(
            max_seqs=count, num_heads=shapes.num_heads, num_kv_heads=shapes.num_kv_heads, head_dim=shapes.head_dim,
            num_multiprocessors=chip.num_multiprocessors, tiling=self.tiling, device=shapes.device,
        )  # fmt: skip
        self._prefix_tiling = tiling_for(
            head_dim=shapes.head_dim, group=group, dtype=shapes.dtype, kv_dtype=kv_dtype,
            shared_memory=chip.shared_memory, device=chip.name,
        )  # fmt: skip
        tile_seqs = self._prefix_tiling.tokens(group)
        rows = [TableRow(at, at, Sampling(1), 1, [], 1, 0) for at in range(count)]
        most = -(-4 * chip.num_multiprocessors // shapes.num_kv_heads) + -(-count // tile_seqs)
        groups = [PrefixGroup(np.arange(count), shared)] if shared else []
        found = prefix_tiles(groups, rows, tile_seqs=tile_seqs, most=most, align=PREFIX_ALIGNMENT)
        room = PrefixRoom.allocate(
            num_tiles=most, tile_seqs=tile_seqs, num_heads=shapes.num_heads, head_dim=shapes.head_dim,
            device=shapes.device,
        )  # fmt: skip
        self._rows = torch.arange(count, dtype=torch.int32, device=shapes.device)
        tiles, of_sequence = (torch.from_numpy(x).to(shapes.device) for x in (found.tiles, found.of_sequence))
        self._prefixes = SharedPrefixes(tiles, of_sequence, room)
        self._plan.update(self._context_lens, of_sequence)

    def __call__(self) -> Tensor:
        tables = self._paged.block_tables
        shared_prefix(
            self.q, self._paged.kv, self._prefixes, block_tables=tables, tiling=self._prefix_tiling, scale=self._scale
        )
        decode_attention(
            self.q, self._paged.kv, self.out, context_lens=self._context_lens, rows=self._rows, block_tables=tables,
            plan=self._plan, prefixes=self._prefixes, scale=self._scale,
        )  # fmt: skip
        return self.out


class FreshPrefill:
    """A callable that runs prompt_attention over `count` prompts of one length, laid out as a layer's product is."""

    def __init__(self, shapes: Shapes, count: int, length: int) -> None:
        heads, kv_heads, rows = shapes.num_heads, shapes.num_kv_heads, count * length
        qkv = torch.randn(rows, heads + 2 * kv_heads, shapes.head_dim, device=shapes.device, dtype=shapes.dtype)
        self.q = qkv[:, :heads].contiguous()
        self.keys, self.values = qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
        starts = torch.arange(0, rows + 1, length, dtype=torch.int32, device=shapes.device)
        self._fresh = FreshPrompts(0, rows, length, starts)
        self._scale = shapes.head_dim**-0.5

    def __call__(self) -> Tensor:
        return prompt_attention(self.q, self.keys, self.values, self._fresh, scale=self._scale)


class Prefill:
    """A callable that runs ragged_attention over the last `new` tokens of all sequences."""

    def __init__(
        self,
        shapes: Shapes,
        paged: Paged,
        new: int,
        *,
        deterministic: bool = False,
        tiling: RaggedTiling | None = None,
    ) -> None:
        count = len(paged.context_lens)
        self.q = torch.randn(count * new, shapes.num_heads, shapes.head_dim, device=shapes.device, dtype=shapes.dtype)
        self.out = torch.empty_like(self.q)
        self._paged, self._scale = paged, shapes.head_dim**-0.5
        group = shapes.num_heads // shapes.num_kv_heads
        chip = Chip.of(shapes.device)
        self.tiling = tiling or tiling_for(
            head_dim=shapes.head_dim, group=group, dtype=shapes.dtype, kv_dtype=paged.kv.keys.dtype,
            shared_memory=chip.shared_memory, split=deterministic, device=chip.name,
        )  # fmt: skip
        lens, contexts = np.full(count, new, np.int32), np.array(paged.context_lens, np.int32)
        tile_tokens = self.tiling.tokens(group)
        self._split = SPLIT if deterministic else 0
        found = split_tiles_of(lens, contexts, tile_tokens, SPLIT) if deterministic else tiles_of(lens, tile_tokens)
        cut = torch.from_numpy(found.cut).to(shapes.device)
        self._pieces = Pieces.allocate(found.num_slots, shapes.num_heads, shapes.head_dim, cut)
        self._rows = torch.arange(count, dtype=torch.int32, device=shapes.device)
        starts = np.arange(count + 1, dtype=np.int32) * new
        self._tiles, self._starts, self._contexts = (
            torch.from_numpy(array).to(shapes.device) for array in (found.tiles, starts, contexts)
        )

    def __call__(self) -> Tensor:
        ragged_attention(
            self.q, self._paged.kv, self.out, tiles=self._tiles, query_starts=self._starts,
            context_lens=self._contexts, rows=self._rows, block_tables=self._paged.block_tables,
            tiling=self.tiling, scale=self._scale, split=self._split, pieces=self._pieces,
        )  # fmt: skip
        return self.out
