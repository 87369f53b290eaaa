"""Finds decodes of a step that begin with the same blocks, for trunkline_kernels.gpu.shared_prefix."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trunkline_worker.runner.gpu.row_table import TableRow

FEWEST_SEQUENCES = 4
SHORTEST_PREFIX = 256  # tokens
LEAST_SAVED = 16_384  # tokens that a step need not read: below, an additional kernel costs as much as it saves
SHORTEST_PIECE = 512  # tokens


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Decodes with a common prefix."""

    members: NDArray[np.int64]  # [num_members]: indices among the step's decodes
    num_tokens: int  # of the prefix


@dataclass(frozen=True, slots=True)
class PrefixTiles:
    """The tiles of a step's shared prefixes on the host; the columns are those of SharedPrefixes."""

    tiles: NDArray[np.int32]  # [num_prefix_tiles, 5]
    of_sequence: NDArray[np.int32]  # [num_decodes, 3]


class PrefixGroups:
    """Finds groups of decodes with a common prefix. It caches lengths: a prefix is unchanged while its members are."""

    def __init__(self, block_tables: NDArray[np.int32], block_size: int) -> None:
        self._tables = block_tables
        self._block_size = block_size
        self._known: dict[int, tuple[tuple[int, ...], int]] = {}  # by first block: members' serials, tokens

    def find(self, rows: Sequence[TableRow], computed: NDArray[np.int32], tile_seqs: int) -> list[PrefixGroup]:
        """Returns the groups if they save at least LEAST_SAVED tokens of reads, else none.

        rows: the step's decodes; computed: [num_decodes] tokens before the new one of each
        """
        if len(rows) < FEWEST_SEQUENCES:
            return []
        indices = np.array([row.index for row in rows])
        firsts = self._tables[indices, 0]
        blocks, counts = np.unique(firsts, return_counts=True)
        groups, known, saved = [], {}, 0
        for block in blocks[counts >= FEWEST_SEQUENCES].tolist():
            members = np.flatnonzero(firsts == block)
            serials = tuple(rows[at].serial for at in members.tolist())
            found = self._known.get(block)
            num_tokens = (
                found[1] if found and found[0] == serials else self._common(indices[members], computed[members])
            )
            known[block] = serials, num_tokens
            if num_tokens >= SHORTEST_PREFIX:
                groups.append(PrefixGroup(members, num_tokens))
                saved += (len(members) - -(-len(members) // tile_seqs)) * num_tokens
        self._known = known
        return groups if saved >= LEAST_SAVED else []

    def _common(self, indices: NDArray[np.int64], computed: NDArray[np.int32]) -> int:
        """Returns the number of tokens in the full blocks that all these rows begin with."""
        most = int(computed.min()) // self._block_size
        tables = self._tables[indices, :most]
        same = (tables == tables[0]).all(axis=0)
        return (most if same.all() else int(same.argmin())) * self._block_size


def prefix_tiles(
    groups: Sequence[PrefixGroup], rows: Sequence[TableRow], *, tile_seqs: int, most: int, align: int
) -> PrefixTiles:
    """Splits prefixes into at most `most` tiles, each with a piece of at least SHORTEST_PIECE tokens.

    groups: the members of each are adjacent in `rows`; groups without room are left out, those that save least first
    rows: the step's decodes
    align: pieces begin at multiples of this many tokens
    """
    of_sequence = np.zeros((len(rows), 3), np.int32)
    tiles: list[tuple[int, int, int, int, int]] = []
    chosen: list[tuple[PrefixGroup, int]] = []
    room = most
    for group in sorted(groups, key=lambda group: -len(group.members) * group.num_tokens):
        chunks = -(-len(group.members) // tile_seqs)
        if chunks <= room // 2 or (chunks <= room and not chosen):
            chosen.append((group, chunks))
            room -= chunks
    reads = sum(group.num_tokens * chunks for group, chunks in chosen)
    # The sum of ceil(tokens / piece) over the chunks is at most their number plus reads / piece.
    piece = max(SHORTEST_PIECE, -(-reads // max(room, 1))) if room else reads
    piece = -(-piece // align) * align
    for group, _ in chosen:
        first = int(group.members[0])
        starts = range(0, group.num_tokens, piece)
        for at in range(first, first + len(group.members), tile_seqs):
            size = min(tile_seqs, first + len(group.members) - at)
            of_sequence[at : at + size] = group.num_tokens, len(tiles), len(starts)
            tiles += [(rows[first].index, at, size, begin, min(begin + piece, group.num_tokens)) for begin in starts]
    assert len(tiles) <= most, f"{len(tiles)} tiles, and there is room for {most}"
    return PrefixTiles(np.array(tiles, np.int32).reshape(-1, 5), of_sequence)
