"""Hot prefixes as watchers see them, over real gRPC."""

import pytest

from tests.router.access.callers import Router
from tests.router.cluster import until
from tests.router.fake_worker import BLOCK, FakeWorker
from tests.router.watch.watch_rig import ACME, OPERATOR, OTHER, KeyRing, until_view, watch, watched_router
from trunkline.v1.fleet_pb2 import WatchFleetResponse
from trunkline.v1.inference_pb2 import TokenIds
from trunkline_router.observe.watch.prefix_view import MOST_CHILDREN, MOST_DEPTH, MOST_NODES

SYSTEM = list(range(5 * BLOCK))


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> KeyRing:
    return KeyRing(tmp_path_factory.mktemp("keys"))


async def ask(router: Router, keys: KeyRing, who: str, prompt: list[int]) -> None:
    await router.generate(keys.headers(who), token_ids=TokenIds(ids=prompt))


async def seen(router: Router, keys: KeyRing, who: str) -> WatchFleetResponse:
    call = watch(router, keys.headers(who))
    number = router.inner.watch.sampler.latest
    view = await until_view(call, lambda view: number is None or view.at_unix_ms > number.at_unix_ms)
    call.cancel()
    return view


async def test_shared_prefixes_are_a_tree_with_sizes_hits_and_holders(keys: KeyRing) -> None:
    a, b = FakeWorker("a"), FakeWorker("b")
    async with watched_router(keys, a, b) as router:
        for tail in (100, 200, 200, 150):
            await ask(router, keys, ACME, [*SYSTEM, *range(tail, tail + 2 * BLOCK)])
        await ask(router, keys, OTHER, [*SYSTEM, 7])
        await ask(router, keys, OTHER, [*SYSTEM, 8])
        await until(lambda: sum(map(len, (a.cached, b.cached))) > 5)
        of_acme, of_other, of_operator = [await seen(router, keys, who) for who in (ACME, OTHER, OPERATOR)]
        ((tree,), (of_others,)) = of_acme.prefixes.by_tenant, of_other.prefixes.by_tenant
        assert (tree.tenant, of_others.tenant) == ("acme", "other"), "each sees its own alone"
        (root,) = tree.roots
        assert (root.tokens, root.own_tokens) == (len(SYSTEM), len(SYSTEM))
        assert root.hits == pytest.approx(4, rel=0.05)
        assert len(root.holders) >= 1
        (child,) = root.children
        assert (child.tokens, child.own_tokens) == (len(SYSTEM) + 2 * BLOCK, 2 * BLOCK)
        assert child.hits == pytest.approx(2, rel=0.05)
        assert {tree.tenant for tree in of_operator.prefixes.by_tenant} == {"acme", "other"}
        (holder,) = (worker for worker in (a, b) if worker.worker_id == root.holders[0])
        holder.tell()  # what it holds has not changed
        await holder.die()
        await until(lambda: any(link.worker is None for link in router.inner.links))
        after = await seen(router, keys, ACME)
        assert holder.worker_id not in after.prefixes.by_tenant[0].roots[0].holders


async def test_a_view_is_bounded_whatever_the_prompts(keys: KeyRing) -> None:
    async with watched_router(keys, FakeWorker("a")) as router:
        noted = router.inner.inference.pools.noted_prompts
        for _ in range(3):
            for number in range(120):
                noted.note("acme", BLOCK, [1, *range(2, 2 + number)])
            for first in range(120):
                noted.note("acme", BLOCK, [1000 + first, first])
        view = await seen(router, keys, ACME)
        (tree,) = view.prefixes.by_tenant
        depth, num_nodes, level = 0, 0, list(tree.roots)
        while level:
            depth, num_nodes = depth + 1, num_nodes + len(level)
            assert len(level) <= MOST_CHILDREN * max(1, num_nodes)
            level = [child for node in level for child in node.children]
        assert depth <= MOST_DEPTH
        assert num_nodes <= MOST_NODES
