"""Which tokens a cached KV block stands for: a tree of interned nodes.

A node is one full block of tokens after its parent. Its digest is found by hash, but a hit is taken only when the
parent is the same node and the tokens are equal, so a colliding hash costs a miss and never a wrong answer.
A node owns its physical copies; `stored` and `removed` are recorded when the first copy comes and the last one goes.

Ownership:
    PrefixTree.nodes   holds a node exactly while it has copies
    node.parent        keeps the chain up to the root alive
    PrefixTree._roots  weak: a root lives as long as a node or a sequence below it
The cached set is prefix-closed: a node with copies has a parent with copies (or a root). See blocks.py for why.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

from trunkline.block_hash import block_hash, root_hash

BlockHash = Callable[[bytes, Sequence[int]], bytes]


class Node:
    """One interned block of tokens, or a root (no parent, no tokens)."""

    __slots__ = ("__weakref__", "copies", "depth", "digest", "parent", "token_ids")

    def __init__(self, parent: "Node | None", token_ids: tuple[int, ...], digest: bytes, depth: int) -> None:
        self.parent = parent
        self.token_ids = token_ids
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
    """Nodes by digest. One node per digest: of two colliding chains the second is simply not cached."""

    def __init__(self, fingerprint: str, block_size: int, hash_block: BlockHash = block_hash) -> None:
        self.block_size = block_size
        self.nodes: dict[bytes, Node] = {}
        self.changes: list[CacheChange] = []  # since last taken; see take_changes
        self._fingerprint = fingerprint
        self._hash_block = hash_block
        self._roots: WeakValueDictionary[bytes, Node] = WeakValueDictionary()

    def root(self, salt: bytes) -> Node:
        """The root of all chains under a salt; equal only for verbatim equal salts."""
        node = self._roots.get(salt)
        if node is None:
            node = Node(None, (), root_hash(self._fingerprint, salt=salt), depth=-1)
            self._roots[salt] = node
        return node

    def digest(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        """The hash of a block of tokens after a parent's hash."""
        return self._hash_block(parent, token_ids)

    def find(self, parent: Node, token_ids: tuple[int, ...], digest: bytes) -> Node | None:
        """The node of these tokens after `parent`, verified."""
        node = self.nodes.get(digest)
        if node is not None and node.parent is parent and node.token_ids == token_ids:
            return node
        return None

    def add_copy(self, parent: Node, token_ids: tuple[int, ...], digest: bytes, block: int) -> Node | None:
        """Records that `block` holds this KV. None where the digest belongs to other tokens: it stays anonymous."""
        node = self.nodes.get(digest)
        if node is None:
            node = Node(parent, token_ids, digest, parent.depth + 1)
            self.nodes[digest] = node
            self.changes.append(Stored(digest, parent.digest, node.depth))
        elif node.parent is not parent or node.token_ids != token_ids:
            return None
        node.copies.append(block)
        return node

    def remove_copy(self, node: Node, block: int) -> None:
        """Forgets one physical copy; the node goes with its last one."""
        node.copies.remove(block)
        if not node.copies:
            del self.nodes[node.digest]
            self.changes.append(Removed(node.digest))

    def take_changes(self) -> list[CacheChange]:
        """What changed since the last call, in order."""
        changes, self.changes = self.changes, []
        return changes
