"""Which tokens a cached KV block stands for: a tree of interned nodes.

A node is one full block of tokens after its parent. Its digest is found by hash, but a hit is taken only when the
parent is the same node and the tokens are equal, so a colliding hash costs a miss and never a wrong answer.
A node owns its physical copies; `Stored` and `Removed` are recorded when it gets its first copy and loses its last.

Ownership:
    PrefixTree.nodes   holds a node exactly while it has copies
    node.parent        keeps the chain up to the root alive
    PrefixTree._roots  weak: a root lives as long as a node or a sequence below it
The cached set is prefix-closed: a node with copies has a parent with copies (or a root). See blocks.py for why.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

from trunkline.block_hash import packed_hash, root_hash

BlockHash = Callable[[bytes, bytes], bytes]  # of a parent's hash and packed tokens


class Node:
    """One interned block of tokens, or a root (no parent, no tokens)."""

    __slots__ = ("__weakref__", "copies", "depth", "digest", "packed", "parent")

    def __init__(self, parent: "Node | None", packed: bytes, digest: bytes, depth: int) -> None:
        self.parent = parent
        self.packed = packed  # its tokens: see block_hash.pack_tokens
        self.digest = digest
        self.depth = depth  # blocks before this one in its chain; -1 for a root
        self.copies: list[int] = []  # physical blocks that hold this KV


@dataclass(frozen=True, slots=True)
class Stored:
    """A node got its first copy."""

    digest: bytes
    parent_digest: bytes
    depth: int


@dataclass(frozen=True, slots=True)
class Removed:
    """A node lost its last copy."""

    digest: bytes


CacheChange = Stored | Removed


class PrefixTree:
    """Nodes by digest. There is one node per digest: of two colliding chains the second is not cached."""

    def __init__(self, fingerprint: str, block_size: int, hash_block: BlockHash = packed_hash) -> None:
        self.block_size = block_size
        self.nodes: dict[bytes, Node] = {}
        self.changes: list[CacheChange] = []  # since last taken; see take_changes
        self._fingerprint = fingerprint
        self._hash_block = hash_block
        self._roots: WeakValueDictionary[bytes, Node] = WeakValueDictionary()

    def root(self, salt: bytes) -> Node:
        """The root of all chains under a salt. Different salts have different roots."""
        node = self._roots.get(salt)
        if node is None:
            node = Node(None, b"", root_hash(self._fingerprint, salt=salt), depth=-1)
            self._roots[salt] = node
        return node

    def digest(self, parent: bytes, packed: bytes) -> bytes:
        """The hash of a block of tokens after a parent's hash."""
        return self._hash_block(parent, packed)

    def digests(self, parent: bytes, blocks: Iterable[bytes]) -> list[bytes]:
        """The hashes of blocks that follow one another, the first after a parent's hash."""
        hash_block, digests = self._hash_block, []
        for packed in blocks:
            parent = hash_block(parent, packed)
            digests.append(parent)
        return digests

    def follow(self, parent: Node, blocks: Sequence[bytes], digests: Sequence[bytes]) -> list[Node]:
        """The nodes of the longest cached prefix of these blocks, verified; the first block follows `parent`."""
        nodes, found = self.nodes, []
        for packed, digest in zip(blocks, digests, strict=True):
            node = nodes.get(digest)
            if node is None or node.parent is not parent or node.packed != packed:
                break
            found.append(node)
            parent = node
        return found

    def add_copy(self, parent: Node, packed: bytes, digest: bytes, block: int) -> Node | None:
        """Records that `block` holds this KV. Returns None if the digest belongs to other tokens."""
        node = self.nodes.get(digest)
        if node is None:
            node = Node(parent, packed, digest, parent.depth + 1)
            self.nodes[digest] = node
            self.changes.append(Stored(digest, parent.digest, node.depth))
        elif node.parent is not parent or node.packed != packed:
            return None
        node.copies.append(block)
        return node

    def remove_copy(self, node: Node, block: int) -> None:
        """Forgets one physical copy. A node is removed with its last copy."""
        node.copies.remove(block)
        if not node.copies:
            del self.nodes[node.digest]
            self.changes.append(Removed(node.digest))

    def take_changes(self) -> list[CacheChange]:
        """The changes since the last call, in order."""
        changes, self.changes = self.changes, []
        return changes
