"""Runs the model over a step. Small steps use captured graphs, because launching their kernels one by one takes longer
than running them. A graph has one shape, and a step is padded to the next shape that has one.
"""

import gc
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trunkline_kernels.gpu.device_batch import DeviceBatch
from trunkline_kernels.gpu.device_rows import gather_rows
from trunkline_kernels.ragged_batch import KVLayer
from trunkline_worker.model.gpu_decoder import GpuDecoder
from trunkline_worker.runner.gpu.prefix_groups import PrefixTiles
from trunkline_worker.runner.gpu.step_inputs import FreshLens, StepInputs, StepLayout, StepShape

# Sizes of decode-only steps, in sequences: powers of two below 8, then in the granularity of matrix products' tiles.
SMALLEST_SIZES = (1, 2, 4)
SIZE_STEP = 8
COARSE_FROM, COARSE_STEP = 256, 32
# Sizes of steps with chunks, in tokens. Larger steps take the device longer than the host takes to launch them.
MIXED_SIZES = (64, 128, 256, 512)
INTERPRETED_SIZES = (8, 32)  # without a GPU, where each padding token takes milliseconds


def decode_sizes(most: int) -> list[int]:
    """Returns the sizes of decode-only steps that have a shape, up to `most` sequences."""
    sizes = [*SMALLEST_SIZES, *range(SIZE_STEP, COARSE_FROM, SIZE_STEP), *range(COARSE_FROM, most, COARSE_STEP)]
    return [*(size for size in sizes if size < most), most]


def mixed_sizes(max_tokens: int, *, capture: bool) -> list[int]:
    """Returns the sizes of steps with chunks that have a shape, up to `max_tokens` tokens."""
    return sorted({min(size, max_tokens) for size in (MIXED_SIZES if capture else INTERPRETED_SIZES)})


class StepPrograms:
    """Chooses the shape of a step, and runs the model over it.

    capture: whether graphs are captured; without them, steps are still padded, and their kernels are launched singly
    compiles: whether kernels are compiled with their first use, as on a GPU
    """

    def __init__(
        self,
        decoder: GpuDecoder,
        kv: list[KVLayer],
        inputs: StepInputs,
        *,
        max_seqs: int,
        max_tokens: int,
        max_pieces: int,
        prefix_tiles: int,
        fewest_sharing: int,
        capture: bool,
        compiles: bool,
    ) -> None:
        self._decoder, self._kv, self._inputs = decoder, kv, inputs
        self._capture = capture
        self._pool: Any = None  # memory that the graphs share
        self._graphs: dict[StepShape, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._decode_sizes = decode_sizes(max_seqs)
        self._mixed_sizes = mixed_sizes(max_tokens, capture=capture)
        # Steps without a graph whose products may have other tiles, see fixed_matmul.tiling_of.
        doubled = [1 << bit for bit in range(self._mixed_sizes[-1].bit_length(), max_tokens.bit_length())]
        self._larger_sizes = sorted({*doubled, max_tokens}) if compiles else []
        self._max_seqs, self._max_pieces, self._prefix_tiles = max_seqs, max_pieces, prefix_tiles
        self._fewest_sharing = fewest_sharing
        self.shapes = self._ladder()
        for shape in self.shapes:
            inputs.reserve(shape)

    def send(self, layout: StepLayout, num_padding: int) -> StepShape:
        """Sends a step's layout to the device, and returns the shape in which run() computes it.

        num_padding: padding tokens that the plan requests
        """
        shape = self.shape_of(layout, num_padding)
        self._inputs.send(layout, shape)
        return shape

    def run(self, layout: StepLayout, shape: StepShape, rows: Tensor | None = None) -> Tensor:
        """Returns the hidden states of the step that was sent: [num_rows or num_tokens, hidden].

        rows: [num_rows] int32, the tokens whose states are returned; None: all of the shape
        """
        graph = self._graphs.get(shape)
        if graph is not None:
            graph[0].replay()
            return graph[1] if rows is None else gather_rows(graph[1], rows)
        batch = self._inputs.batch(shape, layout.num_slots, layout.fresh)
        longest = max(int(layout.query_lens.max(initial=0)), shape.num_tokens - layout.num_tokens)
        self._inputs.build(batch, longest)
        return self._decoder.forward(batch, self._kv, rows)

    def shape_of(self, layout: StepLayout, num_padding: int) -> StepShape:
        """Returns the smallest shape with a program that holds the step, else the step's exact shape."""
        exact = layout.exact._replace(num_tokens=layout.num_tokens + num_padding)
        only_decodes = bool((layout.query_lens == 1).all())
        sizes = self._decode_sizes if only_decodes else self._mixed_sizes
        at = bisect_left(sizes, exact.num_tokens)
        if at == len(sizes):
            return exact
        merges = bool(exact.num_prefix_tiles or exact.num_cut)
        shape = self._decode_shape(sizes[at], merges) if only_decodes else self._mixed_shape(sizes[at], merges)
        fits = all(has >= needs for has, needs in zip(shape, exact, strict=True))
        return shape if fits and layout.num_slots <= self._max_pieces else exact

    def warm_up(self, report: Callable[[str], None]) -> None:
        """Compiles the kernels that steps need, and captures the graphs of all shapes. The largest come first, so that
        the smaller ones reuse their memory."""
        count = len(self.shapes)
        gc.collect()
        gc.freeze()  # the garbage collector need not scan the model again
        for size in reversed(self._larger_sizes):
            self._compute_nothing(self._mixed_shape(size, merges=False))
        for done, shape in enumerate(reversed(self.shapes), start=1):
            if done * 10 // count > (done - 1) * 10 // count:  # ten reports in all
                report(f"warming up, {done} of {count} step shapes")
            batch, hidden = self._compute_nothing(shape)
            if shape.num_seqs == shape.num_tokens:  # as many samples as one of its steps may have
                self._decoder.logits(hidden)
            if not self._capture:
                continue
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                self._inputs.build(batch, shape.num_tokens)
                hidden = self._decoder.forward(batch, self._kv)
            self._pool = self._pool or graph.pool()
            self._graphs[shape] = (graph, hidden)
        # Steps without a graph compute the end of the last layer for some tokens only.
        self._decoder.forward(self._inputs.batch(self.shapes[0]), self._kv, self._inputs.first_row)
        if self._decoder.library_prompts:
            tokens = 2  # padding that stands for a prompt
            shape = StepShape(tokens, 1, 0, 0, 0, 0, num_fresh=1)
            layout = replace(_nothing(shape), fresh=FreshLens(np.array([tokens], np.int32), 0))
            self._inputs.send(layout, shape)
            batch = self._inputs.batch(shape, fresh=layout.fresh)
            self._inputs.build(batch, tokens)
            self._decoder.forward(batch, self._kv)

    def _compute_nothing(self, shape: StepShape) -> tuple[DeviceBatch, Tensor]:
        """Runs the model over padding alone. Returns the batch and its hidden states."""
        self._inputs.send(_nothing(shape), shape)
        batch = self._inputs.batch(shape)
        self._inputs.build(batch, shape.num_tokens)
        return batch, self._decoder.forward(batch, self._kv)

    def _ladder(self) -> list[StepShape]:
        """Returns the shapes that have a program. If contexts can be computed in several parts, each size also has a
        shape for these, because programs for absent parts would cost other steps time."""
        shapes = [self._decode_shape(size, merges=False) for size in self._decode_sizes]
        shapes += [self._mixed_shape(size, merges=False) for size in self._mixed_sizes]
        fewest = 1 if self._decoder.split else self._fewest_sharing
        if self._decoder.split or self._prefix_tiles:
            shapes += [self._decode_shape(size, merges=True) for size in self._decode_sizes if size >= fewest]
            shapes += [self._mixed_shape(size, merges=True) for size in self._mixed_sizes if size > fewest]
        return shapes

    def _decode_shape(self, size: int, merges: bool) -> StepShape:
        if self._decoder.split:  # every sequence is a tile, or several if its context is split into pieces
            pieces = self._max_pieces if merges else 0
            return StepShape(size, size, 0, size + pieces, size if merges else 0, 0)
        return StepShape(size, size, size, 0, 0, self._prefix_tiles if merges else 0)

    def _mixed_shape(self, size: int, merges: bool) -> StepShape:
        seqs = min(size, self._max_seqs)
        tile = self._decoder.tile_seqs
        if self._decoder.split:  # a sequence's first tile may begin before its first new token
            tiles = 2 * seqs + -(-size // tile) + (self._max_pieces if merges else 0)
            return StepShape(size, seqs, 0, tiles, seqs if merges else 0, 0)
        chunks = min(seqs, size // 2)  # sequences with two new tokens or more
        prefix_tiles = self._prefix_tiles if merges else 0
        return StepShape(size, seqs, seqs, chunks + -(-size // tile), 0, prefix_tiles)


def _nothing(shape: StepShape) -> StepLayout:
    """Returns the layout of a step without sequences: all of the shape is padding."""
    none = np.zeros(0, np.int32)
    return StepLayout(
        none.astype(np.int64), none, none, none, 0, np.zeros((0, 4), np.int32), np.zeros((0, 3), np.int32), 0,
        PrefixTiles(np.zeros((0, 5), np.int32), np.zeros((0, 3), np.int32)),
    )  # fmt: skip
