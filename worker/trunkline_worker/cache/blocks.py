"""The KV pool: which sequences hold which physical block, and which blocks still carry a reusable prefix.

A block is in one of five states:
    free     no holder, no identity             at the front of the free list
    cached   no holder, a node of the tree      behind them, least recently freed first
    live     held by one or more sequences
    pinned   held by copies only                see block_copies.py
    loading  held by the copy that writes it    without an identity
All operations are O(1) per block: the free list is intrusive and doubly linked, so a hit unlinks from its middle.

Why the cached set stays prefix-closed: a sequence frees its tail before its head, so whenever a block is freed, some
copy of its parent is freed after it or is still live. Taking the least recently freed block first therefore never
takes the last copy of a parent before its children's.

Sequences that share a prefix which is being computed wait for it instead of computing it again (ComputingPrefixes). A
sequence never waits for one of a lower lane, which may be held up by everything that goes before it.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from trunkline.block_hash import packed_blocks
from trunkline_worker.cache.prefix_tree import Node, PrefixTree
from trunkline_worker.cache.sequence import Sequence
from trunkline_worker.step.lanes import LANES


class FreeList:
    """Blocks without a holder, in the order in which they will be taken. Index `num_blocks` is the sentinel."""

    def __init__(self, num_blocks: int) -> None:
        self._end = num_blocks
        self._next = [*range(1, num_blocks + 1), 0]
        self._previous = [num_blocks, *range(num_blocks)]
        self.size = num_blocks

    def unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before], self._previous[after] = after, before
        self.size -= 1

    def push_front(self, block: int) -> None:
        self._link(self._end, block, self._next[self._end])

    def push_back(self, block: int) -> None:
        self._link(self._previous[self._end], block, self._end)

    def pop_front(self) -> int:
        block: int = self._next[self._end]
        assert block != self._end, "take() without can_take()"
        self.unlink(block)
        return block

    def _link(self, before: int, block: int, after: int) -> None:
        self._next[before] = self._previous[after] = block
        self._previous[block], self._next[block] = before, after
        self.size += 1

    def __iter__(self) -> Iterator[int]:
        block = self._next[self._end]
        while block != self._end:
            yield block
            block = self._next[block]


class KVBlocks:
    """Gives blocks to sequences, takes them back, and remembers what full ones hold."""

    def __init__(self, num_blocks: int, tree: PrefixTree) -> None:
        self.num_blocks = num_blocks
        self.block_size = tree.block_size
        self.tree = tree
        self._holders = [0] * num_blocks  # reference counts
        self._pins = [0] * num_blocks  # of these: copies
        self._loading: set[int] = set()
        self._node: list[Node | None] = [None] * num_blocks
        self._free = FreeList(num_blocks)
        self.num_cached = 0  # without a holder, with an identity

    @property
    def num_available(self) -> int:
        """Blocks that can be taken: free and cached ones."""
        return self._free.size

    @property
    def num_live(self) -> int:
        """Blocks that are held: live, pinned and loading ones."""
        return self.num_blocks - self._free.size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    # Matching

    def match(self, sequence: Sequence) -> int:
        """Looks up how many leading blocks of a sequence are cached; they are not held yet.

        They cover at most all known tokens but the last, which must be computed to sample the next one. The result of
        the last lookup is reused: a chain is intact as long as its last node is.
        """
        if not sequence.may_use_cache:
            return 0
        found = sequence.found
        while found and not found[-1].copies:
            found.pop()
        first, last = len(found), (len(sequence.token_ids) - 1) // self.block_size
        if first < last:
            if len(sequence.digests) < last:
                self._identify(sequence)
            parent = found[-1] if found else sequence.root
            found += self.tree.follow(parent, sequence.packed[first:last], sequence.digests[first:last])
        return len(found)

    def digest(self, sequence: Sequence, index: int) -> bytes:
        """The hash of one of a sequence's full blocks; computed once."""
        if index >= len(sequence.digests):
            self._identify(sequence)
        return sequence.digests[index]

    def _identify(self, sequence: Sequence) -> None:
        """Packs and hashes the blocks that have become full since the last call."""
        digests, size = sequence.digests, self.block_size
        full = len(sequence.token_ids) // size * size
        blocks = packed_blocks(sequence.token_ids[len(digests) * size : full], size)
        sequence.packed += blocks
        digests += self.tree.digests(digests[-1] if digests else sequence.root.digest, blocks)

    # Taking and freeing

    def num_fresh(self, sequence: Sequence) -> int:
        """Blocks that admitting a sequence takes for its uncached tokens. match() must just have been called."""
        return self.blocks_for(len(sequence.token_ids)) - len(sequence.found)

    def can_admit(self, sequence: Sequence, reserve: int) -> bool:
        """Whether a sequence's known tokens fit, its matched blocks held, with `reserve` blocks to spare."""
        room = self._free.size - reserve - self.num_fresh(sequence)
        if room < 0:
            return False
        return room >= len(sequence.found) or room >= self.num_revived(sequence)

    def num_revived(self, sequence: Sequence) -> int:
        """Matched blocks that no sequence holds now."""
        return self._num_revived(sequence.found)

    def _num_revived(self, nodes: list[Node]) -> int:
        holders = self._holders
        return [holders[node.copies[0]] for node in nodes].count(0)

    def admit(self, sequence: Sequence) -> None:
        """Gives a sequence its matched blocks and fresh ones for the rest of its known tokens."""
        assert not sequence.block_table, "admitted twice"
        matched = [node.copies[0] for node in sequence.found]
        self._hold(matched)
        fresh = self.num_fresh(sequence)
        sequence.chain = sequence.found[-1] if matched else sequence.root
        sequence.num_published = sequence.num_matched = len(matched)
        sequence.num_reused = len(matched) * self.block_size
        sequence.num_computed = sequence.num_scheduled = sequence.num_reused
        sequence.block_table = matched + [self._take() for _ in range(fresh)]
        sequence.found = []

    def num_missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that a block table lacks to hold `num_tokens`."""
        return max(0, self.blocks_for(num_tokens) - len(sequence.block_table))

    def can_grow(self, count: int, reserve: int = 0) -> bool:
        """Whether `count` blocks can be taken, with `reserve` to spare."""
        return count + reserve <= self._free.size

    def grow(self, sequence: Sequence, count: int) -> list[int]:
        """Extends a block table by `count` blocks, and returns them."""
        new = [self._take() for _ in range(count)]
        sequence.block_table += new
        return new

    def publish(self, sequence: Sequence) -> None:
        """Gives an identity to the blocks that have been computed in full, so that others can share them."""
        while (sequence.num_published + 1) * self.block_size <= sequence.num_computed:
            index = sequence.num_published
            sequence.num_published += 1
            if sequence.chain is None:  # an earlier block's hash collided: nothing after it can be verified
                continue
            block = sequence.block_table[index]
            digest = self.digest(sequence, index)
            node = self.tree.add_copy(sequence.chain, sequence.packed[index], digest, block)
            sequence.chain = node
            self._node[block] = node

    def detach(self, sequence: Sequence) -> list[int]:
        """Removes and returns a sequence's block table. Its blocks stay held until free() is called with it."""
        table = sequence.block_table
        sequence.block_table = []
        sequence.num_published = sequence.num_matched = 0
        sequence.num_computed = sequence.num_scheduled = sequence.num_pending = 0
        sequence.chain = None
        return table

    def free(self, table: list[int]) -> None:
        """Releases a detached block table, tail first."""
        holders, nodes, push_back = self._holders, self._node, self._free.push_back
        for block in reversed(table):
            holders[block] -= 1
            if holders[block]:
                continue
            if nodes[block] is None:
                self._free.push_front(block)
            else:
                push_back(block)
                self.num_cached += 1

    def num_freed_by(self, table: list[int]) -> int:
        """Blocks that become available when a table is freed: no other sequence holds them."""
        holders = self._holders
        return [holders[block] for block in table].count(1)

    def _hold(self, blocks: list[int]) -> None:
        holders, unlink = self._holders, self._free.unlink
        for block in blocks:
            if not holders[block]:
                unlink(block)
                self.num_cached -= 1
            holders[block] += 1

    def _take(self) -> int:
        block = self._free.pop_front()
        node = self._node[block]
        if node is not None:
            self.tree.remove_copy(node, block)
            self._node[block] = None
            self.num_cached -= 1
        self._holders[block] = 1
        return block

    # Copying: see block_copies.py

    def can_copy(self, nodes: list[Node], count: int) -> bool:
        """Whether a chain can be pinned and `count` blocks be taken."""
        return count + self._num_revived(nodes) <= self._free.size

    def pin(self, nodes: list[Node]) -> list[int]:
        """Holds a block of each node of a chain for copies, until unpin(). Returns them."""
        table = [node.copies[0] for node in nodes]
        self._hold(table)
        for block in table:
            self._pins[block] += 1
        return table

    def unpin(self, table: list[int]) -> None:
        """Releases blocks that copies held, the last one first."""
        for block in table:
            self._pins[block] -= 1
        self.free(table)

    def begin_load(self) -> int:
        """Takes a block for a copy to write."""
        block = self._take()
        self._pins[block] = 1
        self._loading.add(block)
        return block

    def end_load(self, block: int, node: Node | None) -> None:
        """Publishes what a copy has written, a cached node; the block stays pinned until unpin(). None: the copy has
        failed, and the block is free."""
        self._loading.remove(block)
        if node is None:
            self.unpin([block])
            return
        assert node.parent is not None, "a root is no cached block"
        self._node[block] = self.tree.add_copy(node.parent, node.packed, node.digest, block)

    # Checking

    def check_integrity(self, tables: Iterable[list[int]]) -> None:
        """Asserts the partition into states, that reference counts equal holders, and prefix closure. O(blocks).

        tables: all block tables, including those that are detached but not yet freed
        """
        held = Counter(block for table in tables for block in table)
        listed = list(self._free)
        assert len(listed) == len(set(listed)) == self._free.size, "the free list is broken"
        for block in range(self.num_blocks):
            assert self._holders[block] == held[block] + self._pins[block], (
                f"block {block}: {self._holders[block]} counted, {held[block]} and {self._pins[block]} copies hold"
            )
        cached = [block for block in listed if self._node[block] is not None]
        assert self.num_cached == len(cached), "cached blocks miscounted"
        free = [block for block in listed if self._node[block] is None]
        copied = {block for block in range(self.num_blocks) if self._pins[block]}
        pinned = copied - held.keys() - self._loading
        states = Counter([*free, *cached, *held, *pinned, *self._loading])
        assert states == Counter(range(self.num_blocks)), "a block is lost, or in two states"
        assert all(self._node[block] is None and self._pins[block] == 1 for block in self._loading), "published early"
        copies: dict[int, Node] = {}
        for digest, node in self.tree.nodes.items():
            assert node.digest == digest, "a node is filed under another digest"
            assert node.copies, "a node without copies is kept"
            assert node.parent is not None, "a root is no cached block"
            assert node.parent.parent is None or self.tree.nodes.get(node.parent.digest) is node.parent, (
                "the cached set is not prefix-closed"
            )
            copies.update((block, node) for block in node.copies)
        assert copies == {b: n for b, n in enumerate(self._node) if n is not None}, "copies and identities differ"


class ComputingPrefixes:
    """Digests of the full blocks that running sequences are about to compute."""

    def __init__(self, blocks: KVBlocks) -> None:
        self._blocks = blocks
        self._computing: dict[bytes, list[int]] = {}  # digest → sequences about to compute it, by lane

    def covers_next(self, sequence: Sequence, num_matched: int) -> bool:
        """Whether a running sequence of the same or a higher lane is about to compute the first missing block."""
        if not self._computing or not sequence.may_use_cache:
            return False
        if (num_matched + 1) * self._blocks.block_size >= len(sequence.token_ids):
            return False
        computing = self._computing.get(self._blocks.digest(sequence, num_matched))
        return computing is not None and any(computing[: sequence.lane + 1])

    def announce(self, sequence: Sequence) -> None:
        """Announces that a newly admitted sequence will compute the rest of its full blocks."""
        first = sequence.num_computed // self._blocks.block_size
        sequence.num_announced = len(sequence.token_ids) // self._blocks.block_size
        for index in range(first, sequence.num_announced):
            digest = self._blocks.digest(sequence, index)
            self._computing.setdefault(digest, [0 for _ in LANES])[sequence.lane] += 1

    def withdraw(self, sequence: Sequence, until: int | None = None) -> None:
        """Withdraws announced blocks: those before block `until`, or all that are left."""
        first = sequence.num_computed // self._blocks.block_size
        last = sequence.num_announced if until is None else min(until, sequence.num_announced)
        for index in range(first, last):
            digest = sequence.digests[index]
            computing = self._computing[digest]
            computing[sequence.lane] -= 1
            if not any(computing):
                del self._computing[digest]

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Asserts that exactly the blocks announced by running sequences are counted."""
        announced = Counter(
            (sequence.digests[index], sequence.lane)
            for sequence in running
            for index in range(sequence.num_computed // self._blocks.block_size, sequence.num_announced)
        )
        counted = {(digest, lane): n for digest, lanes in self._computing.items() for lane, n in enumerate(lanes) if n}
        assert counted == announced, "blocks being computed miscounted"
