"""A step's inputs on the device: the host sends its layout in one copy, and the rest is built there from the rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trunkline_kernels.gpu.decode_plan import DecodePlan
from trunkline_kernels.gpu.device_batch import DeviceBatch
from trunkline_kernels.gpu.device_rows import step_inputs
from trunkline_kernels.gpu.prompt_attention import FreshPrompts
from trunkline_kernels.gpu.ragged_attention import Pieces
from trunkline_kernels.gpu.shared_prefix import PrefixRoom, SharedPrefixes
from trunkline_worker.model.gpu_decoder import GpuDecoder
from trunkline_worker.runner.gpu.prefix_groups import PrefixGroup, PrefixGroups, PrefixTiles, prefix_tiles
from trunkline_worker.runner.gpu.row_table import RowTable, TableRow
from trunkline_worker.step.plan import SequenceStep

ALIGNMENT = 4  # int32 values: 16 bytes, the alignment that kernels are specialised for
PREFIX_ALIGNMENT = 128  # tokens: a multiple of every tile of keys


class StepShape(NamedTuple):
    """The sizes of a step's inputs, including padding."""

    num_tokens: int
    num_seqs: int
    num_decodes: int  # sequences that decode_attention computes
    num_tiles: int  # of ragged_attention
    num_cut: int  # sequences whose contexts are split into pieces
    num_prefix_tiles: int  # of shared_prefix
    num_fresh: int = 0  # prompts that prompt_attention computes: none in a captured graph


class FreshLens(NamedTuple):
    """The prompts that prompt_attention computes: the last sequences of a step."""

    lens: NDArray[np.int32]  # [num_fresh] tokens of each
    first_row: int  # index of the first one's first token in the step


@dataclass(frozen=True, slots=True)
class StepLayout:
    """The host's description of one step. Decodes come first, then chunks, then the prompts of `fresh`.

    num_seqs is the number of the plan's steps: a layout is not padded.
    """

    order: NDArray[np.int64]  # [num_seqs]: indices into the plan's steps
    rows: NDArray[np.int32]  # [num_seqs]: row of DeviceRows of each sequence
    query_lens: NDArray[np.int32]  # [num_seqs]: new tokens of each sequence
    context_lens: NDArray[np.int32]  # [num_seqs]: tokens of each sequence, including new ones
    num_decodes: int  # sequences that decode_attention computes
    tiles: NDArray[np.int32]  # [num_tiles, 4]: see ragged_attention.Tiles
    cut: NDArray[np.int32]  # [num_cut, 3]: see ragged_attention.Tiles
    num_slots: int  # pieces of the contexts in `cut`
    prefixes: PrefixTiles
    fresh: FreshLens | None = None

    @property
    def num_tokens(self) -> int:
        """New tokens of all sequences, without padding."""
        return int(self.query_lens.sum())

    @property
    def exact(self) -> StepShape:
        """The step's shape without padding."""
        return StepShape(
            self.num_tokens, len(self.rows), self.num_decodes, len(self.tiles), len(self.cut),
            len(self.prefixes.tiles), len(self.fresh.lens) if self.fresh else 0,
        )  # fmt: skip

    def last_tokens(self) -> NDArray[np.int32]:
        """Returns the index of each sequence's last token in the step, in the order of the plan: [num_seqs] int32."""
        last = np.empty(len(self.order), np.int32)
        last[self.order] = np.cumsum(self.query_lens) - 1
        return last


class StepLayouts:
    """Turns plans into layouts for a decoder."""

    def __init__(
        self, decoder: GpuDecoder, groups: PrefixGroups, most_prefix_tiles: int, *, most_graph_tokens: int
    ) -> None:
        """most_graph_tokens: most tokens of a step with chunks that a captured graph computes"""
        self._decoder = decoder
        self._most_graph_tokens = most_graph_tokens
        self._groups = groups
        self._most_prefix_tiles = most_prefix_tiles
        # A window hides a prefix from some layers; with `split`, bits must not depend on the other sequences of a step.
        self.shares = not decoder.split and all(window is None for window in decoder.spec.windows)

    def lay_out(self, steps: Sequence[SequenceStep], rows: Sequence[TableRow]) -> StepLayout:
        """Returns the layout of a plan's steps. rows: the row of each step"""
        num_new = np.array([step.num_new for step in steps], np.int32)
        computed = np.array([step.num_computed for step in steps], np.int32)
        is_chunk = num_new != 1
        # The launches of a graph cannot depend on the length of prompts, so its prompts are left to ragged_attention.
        is_fresh = is_chunk & (computed == 0) & self._decoder.library_prompts
        if num_new.sum() <= self._most_graph_tokens:
            is_fresh[:] = False
        order = np.argsort(is_chunk.astype(np.int8) + is_fresh, kind="stable")
        num_decodes = 0 if self._decoder.split else int((num_new == 1).sum())
        tile_seqs = self._decoder.tile_seqs
        prefixes = PrefixTiles(np.zeros((0, 5), np.int32), np.zeros((num_decodes, 3), np.int32))
        if self.shares and num_decodes:
            decodes = order[:num_decodes]
            groups = self._groups.find([rows[at] for at in decodes.tolist()], computed[decodes], tile_seqs)
            if groups:
                grouped = np.concatenate([group.members for group in groups])
                others = np.setdiff1d(np.arange(num_decodes), grouped)
                order = np.concatenate([decodes[grouped], decodes[others], order[num_decodes:]])
                ends = np.cumsum([len(group.members) for group in groups])
                placed = [
                    PrefixGroup(np.arange(end - len(group.members), end), group.num_tokens)
                    for group, end in zip(groups, ends.tolist(), strict=True)
                ]
                prefixes = prefix_tiles(
                    placed, [rows[at] for at in order[:num_decodes].tolist()], tile_seqs=tile_seqs,
                    most=self._most_prefix_tiles, align=PREFIX_ALIGNMENT,
                )  # fmt: skip
        query_lens, context_lens = num_new[order], (computed + num_new)[order]
        first_fresh = len(steps) - int(is_fresh.sum())
        found = self._decoder.tiles(query_lens[num_decodes:first_fresh], context_lens[num_decodes:first_fresh])
        found.tiles[:, 0] += num_decodes
        fresh = None
        if is_fresh.any():
            fresh = FreshLens(query_lens[first_fresh:], int(query_lens[:first_fresh].sum()))
        return StepLayout(
            order, np.array([row.index for row in rows], np.int32)[order], query_lens, context_lens, num_decodes,
            found.tiles, found.cut, found.num_slots, prefixes, fresh,
        )  # fmt: skip


class StepInputs:
    """The tensors that a step reads. Their addresses are the same in all steps of a shape, because graphs keep them."""

    def __init__(
        self, decoder: GpuDecoder, table: RowTable, *, block_size: int, max_tokens: int, max_seqs: int,
        max_pieces: int, max_prefix_tiles: int,
    ) -> None:  # fmt: skip
        spec, device = decoder.spec, table.device_rows.tokens.device
        self._table, self._device, self._block_size = table, device, block_size
        self._spec, self._split = spec, decoder.split
        self._tokens = torch.empty(3, -(-max_tokens // ALIGNMENT) * ALIGNMENT, dtype=torch.int64, device=device)
        self._plan = DecodePlan.allocate(
            max_seqs=max_seqs, num_heads=spec.num_heads, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim,
            num_multiprocessors=decoder.chip.num_multiprocessors, tiling=decoder.decode_tiling, device=device,
            windows=spec.windows,
        )  # fmt: skip
        self._room = PrefixRoom.allocate(
            num_tiles=max_prefix_tiles, tile_seqs=decoder.tile_seqs, num_heads=spec.num_heads,
            head_dim=spec.head_dim, device=device,
        )  # fmt: skip
        nothing = torch.zeros(0, 3, dtype=torch.int32, device=device)
        self._pieces = Pieces.allocate(max_pieces if self._split else 0, spec.num_heads, spec.head_dim, nothing)
        self._buffer = torch.zeros(0, dtype=torch.int32, device=device)
        self.first_row = torch.zeros(1, dtype=torch.int32, device=device)

    def reserve(self, shape: StepShape) -> None:
        """Makes room for the layouts of steps of this shape. Call it before any batch(), whose tensors it moves."""
        size = sum(_padded(size) for size in _sizes(shape).values())
        if size > len(self._buffer):
            self._buffer = torch.zeros(size, dtype=torch.int32, device=self._device)

    def batch(self, shape: StepShape, num_slots: int = 0, fresh: FreshLens | None = None) -> DeviceBatch:
        """Returns the tensors of a step of this shape.

        num_slots, fresh: of the step's layout
        """
        parts: dict[str, Tensor] = {}
        offset = 0
        for name, size in _sizes(shape).items():
            parts[name] = self._buffer[offset : offset + size]
            offset += _padded(size)
        token_ids, positions, slots = (column[: shape.num_tokens] for column in self._tokens)
        assert len(token_ids) == shape.num_tokens, f"there is no room for the tokens of {shape}"
        pieces = None
        if self._split:
            cut = parts["cut"].view(-1, 3)
            room = self._pieces
            if num_slots > len(room.partial_out):  # allocated for this step only
                room = Pieces.allocate(num_slots, self._spec.num_heads, self._spec.head_dim, cut)
            pieces = Pieces(cut, room.partial_out, room.partial_stats)
        return DeviceBatch(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            query_starts=parts["query_starts"],
            context_lens=parts["context_lens"],
            rows=parts["rows"],
            block_tables=self._table.device_rows.block_tables,
            tiles=parts["tiles"].view(-1, 4),
            pieces=pieces,
            decode_lens=parts["decode_lens"],
            decode_plan=self._plan,
            prefixes=SharedPrefixes(parts["prefix_tiles"].view(-1, 5), parts["prefixes"].view(-1, 3), self._room),
            fresh=fresh
            and FreshPrompts(fresh.first_row, int(fresh.lens.sum()), int(fresh.lens.max()), parts["fresh_starts"]),
        )

    def send(self, layout: StepLayout, shape: StepShape) -> None:
        """Sends a layout, padded to a shape, to the device in one copy."""
        count, decodes = len(layout.rows), layout.num_decodes
        sizes = _sizes(shape)
        host = torch.zeros(sum(map(_padded, sizes.values())), dtype=torch.int32, pin_memory=self._device.type == "cuda")
        array: NDArray[np.int32] = host.numpy()
        starts = np.cumsum(layout.query_lens)
        values: dict[str, tuple[NDArray[Any], int]] = {  # the values, and the padding after them
            "query_starts": (np.concatenate(([0], starts)), layout.num_tokens),
            "context_lens": (layout.context_lens, 0),
            "rows": (layout.rows, 0),
            "decode_lens": (layout.context_lens[:decodes], 0),
            "prefixes": (layout.prefixes.of_sequence[:decodes], 0),
            "tiles": (layout.tiles, -1),
            "cut": (layout.cut, 0),
            "prefix_tiles": (layout.prefixes.tiles, -1),
            "fresh_starts": (np.cumsum([0, *layout.fresh.lens] if layout.fresh else []), 0),
        }
        offset = 0
        for name, size in sizes.items():
            said, rest = values[name]
            array[offset : offset + said.size] = said.reshape(-1)
            if rest:
                array[offset + said.size : offset + size] = rest
            offset += _padded(size)
        assert count <= shape.num_seqs, f"{count} sequences do not fit {shape}"
        assert len(array) <= len(self._buffer), f"no room was reserved for {shape}"
        self._buffer[: len(array)].copy_(host, non_blocking=True)

    def build(self, batch: DeviceBatch, longest: int) -> None:
        """Writes token ids, positions and slots of the new tokens, on the device.

        longest: most new tokens of one sequence, or the number of padding tokens if that is larger
        """
        step_inputs(
            self._table.device_rows, query_starts=batch.query_starts, context_lens=batch.context_lens,
            rows=batch.rows, token_ids=batch.token_ids, positions=batch.positions, slots=batch.slots,
            block_size=self._block_size, longest=longest,
        )  # fmt: skip


def _sizes(shape: StepShape) -> dict[str, int]:
    """Returns the number of int32 values of each part of a layout, in their order in the buffer."""
    return {
        "query_starts": shape.num_seqs + 1,
        "context_lens": shape.num_seqs,
        "rows": shape.num_seqs,
        "decode_lens": shape.num_decodes,
        "prefixes": 3 * shape.num_decodes,
        "tiles": 4 * shape.num_tiles,
        "cut": 3 * shape.num_cut,
        "prefix_tiles": 5 * shape.num_prefix_tiles,
        "fresh_starts": shape.num_fresh + 1 if shape.num_fresh else 0,
    }


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
