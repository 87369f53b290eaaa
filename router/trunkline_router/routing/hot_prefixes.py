"""The prefixes that recent prompts of one tenant shared, as a tree of block keys.

It holds no tokens and no text, and the prompts of two tenants never meet in it. Folding prompts into it is left to the
reader.
"""

import secrets
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from trunkline_router.routing.route_request import NotedPrompts

HALF_LIFE_S = 300.0  # after this time a hit counts half
MOST_NODES, MOST_KEYS = 4096, 1 << 18  # in all; of 8 bytes each
LEAST_REQUESTS = 2  # a prefix of one request is not shared
FORGOTTEN_HITS = 0.1


@dataclass(slots=True)
class Prefix:
    """The blocks that a prefix adds to its parent."""

    keys: "array[int]"
    block_size: int
    requests: int  # that began with it, of those that were folded in
    hits: float  # the same, each counting less with time; as of `last_s`
    last_s: float
    children: "dict[int, Prefix]" = field(default_factory=dict)  # by their first key
    id: str = field(default_factory=lambda: secrets.token_hex(6))

    def hits_at(self, now_s: float) -> float:
        return float(self.hits * 0.5 ** (max(0.0, now_s - self.last_s) / HALF_LIFE_S))

    def hit(self, now_s: float, weight: float) -> None:
        self.hits = self.hits_at(now_s) + weight
        self.requests += 1
        self.last_s = now_s

    @property
    def is_shared(self) -> bool:
        return self.requests >= LEAST_REQUESTS

    def cut(self, length: int) -> "Prefix":
        """Returns a prefix of the first `length` blocks, whose only child is the rest."""
        head = Prefix(self.keys[:length], self.block_size, self.requests, self.hits, self.last_s)
        self.keys = self.keys[length:]
        head.children[self.keys[0]] = self
        return head


class HotPrefixes:
    """The trees of all tenants, made of the noted prompts."""

    def __init__(self, noted: NotedPrompts) -> None:
        self._noted = noted
        self._roots: dict[str, dict[int, Prefix]] = {}  # by tenant and first key
        self.num_nodes = self.num_keys = 0

    def fold(self, now_s: float) -> None:
        """Takes the noted prompts into the trees."""
        prompts, weight = self._noted.take()
        for tenant, block_size, chain in prompts:
            self._insert(tenant, block_size, chain, now_s, weight)
        if prompts:
            self._forget(now_s)

    def tenants(self) -> Sequence[str]:
        return list(self._roots)

    def roots(self, tenant: str) -> list[Prefix]:
        """Returns the tenant's prefixes that share no beginning, those of single requests included."""
        return list(self._roots.get(tenant, {}).values())

    def _insert(self, tenant: str, block_size: int, chain: "array[int]", now_s: float, weight: float) -> None:
        siblings = self._roots.setdefault(tenant, {})
        while chain:
            node = siblings.get(chain[0])
            if node is None:
                siblings[chain[0]] = Prefix(chain, block_size, 1, weight, now_s)
                self.num_nodes += 1
                self.num_keys += len(chain)
                return
            length = common_length(node.keys, chain)
            if length < len(node.keys):
                node = siblings[chain[0]] = node.cut(length)
                self.num_nodes += 1
            node.hit(now_s, weight)
            siblings, chain = node.children, chain[length:]

    def _forget(self, now_s: float) -> None:
        """Drops prefixes that have not been used for long, and while there are too many, those with the fewest hits."""
        least = FORGOTTEN_HITS
        self._drop_below(least, now_s)
        while self.num_nodes > MOST_NODES or self.num_keys > MOST_KEYS:
            least *= 2
            self._drop_below(least, now_s)

    def _drop_below(self, least: float, now_s: float) -> None:
        """A prefix has at least the hits of each longer one, so what is dropped has no descendant that stays. Not
        recursive: prompts that each extend the one before make a tree as deep as there are prompts."""
        self.num_nodes = self.num_keys = 0
        open_ = list(self._roots.values())
        while open_:
            siblings = open_.pop()
            for key in [key for key, node in siblings.items() if node.hits_at(now_s) < least]:
                del siblings[key]
            for node in siblings.values():
                self.num_nodes += 1
                self.num_keys += len(node.keys)
                open_.append(node.children)
        self._roots = {tenant: roots for tenant, roots in self._roots.items() if roots}


def common_length(one: "array[int]", other: "array[int]") -> int:
    """Returns how many leading keys are equal."""
    shorter = min(len(one), len(other))
    different = np.flatnonzero(np.asarray(one)[:shorter] != np.asarray(other)[:shorter])
    return int(different[0]) if different.size else shorter
