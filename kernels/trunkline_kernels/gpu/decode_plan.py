"""How decode_attention cuts contexts into pieces: decided on the device, from the contexts of the step.

Few and long contexts are cut into many pieces, many short ones are not cut at all. A captured graph therefore serves
any contexts.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

SHORTEST_PIECE = 256  # tokens: below, a program's start and the merge cost more than the reading


@triton.jit(do_not_specialize=["num_seqs", "num_slots", "extra"])
def _plan_pieces(
    context_lens,  # [num_seqs] int32; 0: none of decode_attention's
    prefixes,  # [num_seqs, 3] int32: the first of each are the tokens that shared_prefix has seen to
    piece_sequences,  # [num_seqs + extra] int32 ← the sequence of each piece; -1: there is no such piece
    piece_starts,  # [num_seqs + 1] int32 ← number of each sequence's first piece
    piece_len,  # [1] int32 ← tokens
    num_seqs,
    num_slots,  # length of piece_sequences
    extra,
    SHORTEST: tl.constexpr,
    PADDED_SEQS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid: (num_seqs + 1). Each program places the pieces of its sequence; the last one clears what is left over."""
    sequence = tl.program_id(0)
    index = tl.arange(0, PADDED_SEQS)
    lens = tl.load(context_lens + index, mask=index < num_seqs, other=0)
    lens -= tl.load(prefixes + index * 3, mask=index < num_seqs, other=0)
    # ceil(len / length) summed over the sequences is at most num_seqs + total / length: no more than the slots.
    wanted = (tl.sum(lens) + extra - 1) // extra
    length = tl.maximum((wanted + SHORTEST - 1) // SHORTEST * SHORTEST, SHORTEST)
    counts = (lens + length - 1) // length
    before = tl.sum(tl.where(index < sequence, counts, 0))
    own = tl.sum(tl.where(index == sequence, counts, 0))
    tl.store(piece_starts + sequence, before)
    if sequence == num_seqs:
        tl.store(piece_len, length)
        own = num_slots - before
    for start in tl.range(0, own, CHUNK):
        at = start + tl.arange(0, CHUNK)
        tl.store(piece_sequences + before + at, tl.where(sequence == num_seqs, -1, sequence), mask=at < own)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """How a step's contexts are cut, the same for all layers, and room for the pieces' results."""

    piece_sequences: Tensor  # [num_pieces] int32
    piece_starts: Tensor  # [max_seqs + 1] int32
    piece_len: Tensor  # [1] int32
    partial_out: Tensor  # [num_pieces, num_heads, head_dim] float32
    partial_stats: Tensor  # [num_pieces, num_heads, 2] float32
    extra: int  # pieces that there may be beyond one per sequence

    @classmethod
    def allocate(
        cls,
        *,
        max_seqs: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        num_multiprocessors: int,
        device: torch.device,
    ) -> "DecodePlan":
        """Room for steps of up to `max_seqs` sequences, in as many pieces as keep the device busy."""
        # Several times what runs at once, so that what is left for last is little.
        extra = max(1, -(-8 * num_multiprocessors // num_kv_heads))
        pieces = max_seqs + extra

        def numbers(count: int) -> Tensor:
            return torch.empty(count, dtype=torch.int32, device=device)

        def partial(width: int) -> Tensor:
            return torch.empty(pieces, num_heads, width, dtype=torch.float32, device=device)

        return cls(numbers(pieces), numbers(max_seqs + 1), numbers(1), partial(head_dim), partial(2), extra)

    def num_pieces(self, num_seqs: int) -> int:
        """Most pieces of a step with this many sequences."""
        return num_seqs + self.extra

    def update(self, context_lens: Tensor, prefixes: Tensor) -> None:
        """Cuts the contexts of a step, on the device.

        context_lens: [num_seqs] int32; 0: none of decode_attention's
        prefixes: [num_seqs, 3] int32, of SharedPrefixes
        """
        num_seqs = len(context_lens)
        _plan_pieces[(num_seqs + 1,)](
            context_lens, prefixes, self.piece_sequences, self.piece_starts, self.piece_len, num_seqs,
            self.num_pieces(num_seqs), self.extra, SHORTEST_PIECE, triton.next_power_of_2(len(self.piece_starts) - 1),
            64, num_warps=1,
        )  # fmt: skip
