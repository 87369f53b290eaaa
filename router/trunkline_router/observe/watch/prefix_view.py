"""Hot prefixes as messages: their sizes, hits and holders."""

from collections.abc import Iterable, Sequence

from trunkline.v1.fleet_pb2 import HotPrefixes as HotPrefixesMessage
from trunkline.v1.fleet_pb2 import PrefixNode, TenantPrefixes
from trunkline_router.observe.recent.viewer import Viewer
from trunkline_router.routing.hot_prefixes import HALF_LIFE_S, Prefix
from trunkline_router.workers.pool import Pools

MOST_NODES = 64  # in one view
MOST_CHILDREN = 8
MOST_DEPTH = 8
MOST_TENANTS = 16
LEAST_HITS = 0.5


def prefixes_view(pools: Pools, viewer: Viewer, now_s: float) -> HotPrefixesMessage | None:
    """Returns the prefixes that requests of a tenant shared, the hottest first; None if the viewer may not see the
    cache."""
    if not viewer.sees_cache or not viewer.sees_requests:
        return None
    hot = pools.hot_prefixes
    names = hot.tenants() if viewer.is_operator else [viewer.tenant]
    of_tenants = [(tenant, _hottest(hot.roots(tenant), now_s)) for tenant in names]
    found = [(tenant, roots) for tenant, roots in of_tenants if roots]
    found.sort(key=lambda entry: -entry[1][0].hits_at(now_s))
    writer = _Writer(pools, now_s)
    shown = HotPrefixesMessage(half_life_s=HALF_LIFE_S)
    for tenant, roots in found[:MOST_TENANTS]:
        if nodes := writer.nodes(roots, 0, 1):
            shown.by_tenant.append(TenantPrefixes(tenant=tenant, roots=nodes))
    return shown


def _hottest(siblings: Iterable[Prefix], now_s: float) -> Sequence[Prefix]:
    shared = [node for node in siblings if node.is_shared and node.hits_at(now_s) >= LEAST_HITS]
    return sorted(shared, key=lambda node: -node.hits_at(now_s))[:MOST_CHILDREN]


class _Writer:
    """Writes at most MOST_NODES nodes of one view."""

    def __init__(self, pools: Pools, now_s: float) -> None:
        self._index = pools.index
        self._now_s = now_s
        workers = [link.worker for link in pools.links if link.worker is not None]
        self._names = [(worker.blocks.bit, worker.worker_id) for worker in workers]
        self._left = MOST_NODES

    def nodes(self, siblings: Sequence[Prefix], tokens_before: int, depth: int) -> list[PrefixNode]:
        nodes = []
        for prefix in siblings:
            if not self._left:
                break
            self._left -= 1
            own_tokens = len(prefix.keys) * prefix.block_size
            holders = self._index.holders(prefix.keys[-1])
            node = PrefixNode(
                id=prefix.id,
                tokens=tokens_before + own_tokens,
                own_tokens=own_tokens,
                hits=prefix.hits_at(self._now_s),
                age_s=max(0.0, self._now_s - prefix.last_s),
                holders=[name for bit, name in self._names if holders & bit],
            )
            if depth < MOST_DEPTH:
                children = _hottest(prefix.children.values(), self._now_s)
                node.children.extend(self.nodes(children, node.tokens, depth + 1))
            nodes.append(node)
        return nodes
