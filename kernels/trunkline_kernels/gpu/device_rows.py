"""Rows on the device with the state of every running sequence: tokens, block table, sampling parameters.

A step reads its inputs from these rows and writes each sampled token to its row. The token need not pass through the
host before the next step begins.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

SEGMENT_BLOCK = 1024
INPUT_BLOCK = 128

# Columns of DeviceRows.sampling: first those with the bits of a float32, which are parameters by these names.
FLOAT_COLUMNS = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
TEMPERATURE, TOP_P, MIN_P, REPETITION, FREQUENCY, PRESENCE = map(tl.constexpr, range(len(FLOAT_COLUMNS)))
TOP_K = tl.constexpr(len(FLOAT_COLUMNS))  # 0: all
SEED_LOW = tl.constexpr(len(FLOAT_COLUMNS) + 1)  # halves of the choice's seed
SEED_HIGH = tl.constexpr(len(FLOAT_COLUMNS) + 2)
PROMPT_LEN = tl.constexpr(len(FLOAT_COLUMNS) + 3)  # tokens that penalties count as the prompt
SAMPLING_COLUMNS = tl.constexpr(len(FLOAT_COLUMNS) + 4)


@triton.jit
def _write_segments(
    target,  # [.., width] int32
    segments,  # [num_segments, 4] int32: row, first column, number of values, index of the first in data
    data,  # [num_values] int32
    width,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (num_segments, blocks of the longest segment)."""
    segment = segments + tl.program_id(0) * 4
    row = tl.load(segment).to(tl.int64)
    first = tl.load(segment + 1)
    count = tl.load(segment + 2)
    source = tl.load(segment + 3)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = at < count
    tl.store(target + row * width + first + at, tl.load(data + source + at, mask=known, other=0), mask=known)


@triton.jit(do_not_specialize=["num_seqs", "num_tokens"])
def _step_inputs(
    tokens,  # [num_rows, token_width] int32
    tables,  # [num_rows, table_width] int32
    query_starts,  # [num_seqs + 1] int32
    context_lens,  # [num_seqs] int32
    rows,  # [num_seqs] int32
    token_ids, positions, slots,  # [num_tokens] int64 ←
    token_width,
    table_width,
    num_seqs,
    num_tokens,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (num_seqs + 1, blocks of the longest sequence's new tokens). The last programs fill the padding."""
    sequence = tl.program_id(0)
    start = tl.load(query_starts + sequence)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if sequence == num_seqs:
        padding = start + at < num_tokens
        nothing = tl.zeros([BLOCK], tl.int64)
        tl.store(token_ids + start + at, nothing, mask=padding)
        tl.store(positions + start + at, nothing, mask=padding)
        tl.store(slots + start + at, nothing - 1, mask=padding)
    else:
        count = tl.load(query_starts + sequence + 1) - start
        known = at < count
        row = tl.load(rows + sequence).to(tl.int64)
        position = tl.load(context_lens + sequence) - count + at
        block = tl.load(tables + row * table_width + position // BLOCK_SIZE, mask=known, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        token = tl.load(tokens + row * token_width + position, mask=known, other=0)
        tl.store(token_ids + start + at, token.to(tl.int64), mask=known)
        tl.store(positions + start + at, position.to(tl.int64), mask=known)
        tl.store(slots + start + at, slot, mask=known)


@triton.jit
def _gather_rows(
    source,  # [.., DIM]
    index,  # [num_rows] int32 or int64
    out,  # [num_rows, DIM]
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (num_rows, blocks of DIM)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    chosen = tl.load(index + row).to(tl.int64)
    values = tl.load(source + chosen * DIM + at, mask=at < DIM, other=0.0)
    tl.store(out + row * DIM + at, values, mask=at < DIM)


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """The state of every running sequence, one row each. Floats are stored in int32 columns as their bits."""

    tokens: Tensor  # [num_rows, max_tokens] int32: prompt, then output
    block_tables: Tensor  # [num_rows, max_blocks] int32
    sampling: Tensor  # [num_rows, SAMPLING_COLUMNS] int32

    @classmethod
    def allocate(cls, *, num_rows: int, max_tokens: int, max_blocks: int, device: torch.device) -> "DeviceRows":
        """Allocates rows of zeros."""

        def table(width: int) -> Tensor:
            return torch.zeros(num_rows, width, dtype=torch.int32, device=device)

        return cls(table(max_tokens), table(max_blocks), table(SAMPLING_COLUMNS.value))


def write_segments(target: Tensor, segments: Tensor, data: Tensor, longest: int) -> None:
    """Sets target[row, first : first + count] = data[source : source + count] for every segment.

    target: [num_rows, width] int32; segments: [num_segments, 4] int32, (row, first, count, source)
    data: [num_values] int32; longest: values of the longest segment
    """
    if len(segments) and longest:
        _write_segments[(len(segments), triton.cdiv(longest, SEGMENT_BLOCK))](
            target, segments, data, target.shape[1], SEGMENT_BLOCK
        )


def step_inputs(
    device_rows: DeviceRows,
    *,
    query_starts: Tensor,
    context_lens: Tensor,
    rows: Tensor,
    token_ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    block_size: int,
    longest: int,
) -> None:
    """Writes token ids, positions and KV slots of a step's new tokens, and of the padding after them.

    query_starts: [num_seqs + 1], context_lens, rows: [num_seqs] int32; a padding sequence has no new tokens
    token_ids, positions, slots: [num_tokens] int64, all overwritten; a padding token is 0 with slot -1
    longest: most new tokens of one sequence, or the number of padding tokens if that is larger
    """
    num_seqs = len(context_lens)
    _step_inputs[(num_seqs + 1, max(1, triton.cdiv(longest, INPUT_BLOCK)))](
        device_rows.tokens, device_rows.block_tables, query_starts, context_lens, rows, token_ids, positions, slots,
        device_rows.tokens.shape[1], device_rows.block_tables.shape[1], num_seqs, len(token_ids), block_size,
        INPUT_BLOCK,
    )  # fmt: skip


def gather_rows(source: Tensor, index: Tensor) -> Tensor:
    """Returns source[index], such as embeddings of tokens or last states of sequences.

    source: [num_sources, dim] contiguous, index: [num_rows] int32 or int64 → [num_rows, dim]
    """
    dim = source.shape[1]
    out = source.new_empty(len(index), dim)
    block = min(2048, triton.next_power_of_2(dim))
    if len(index):
        _gather_rows[(len(index), triton.cdiv(dim, block))](source, index, out, dim, block)
    return out
