"""The live page of one of two routers that share a Redis. The other one has two processes."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import pytest

from tests.cluster.processes import Process, wait_until
from tests.page.browser import Browser
from tests.page.cluster import PageCluster
from trunkline_bench.servers.ports import free_port
from trunkline_bench.servers.redis_server import RedisServer

pytestmark = pytest.mark.slow


@dataclass(frozen=True, slots=True)
class Fleet:
    """missing: the address of a worker that the first router looks for in vain"""

    redis: RedisServer
    one: PageCluster
    other: PageCluster
    missing: str


@pytest.fixture(scope="module")
def fleet(cluster: PageCluster) -> Iterator[Fleet]:
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer())
        environment = {"TRUNKLINE_REDIS_URL": redis.url}
        missing, ports = f"127.0.0.1:{free_port()}", (free_port(), free_port())

        def start(port: int, name: str, *workers: str, **more: str) -> PageCluster:
            given = {**environment, "TRUNKLINE_ROUTER_ID": name, **more}
            router: Process = cluster.another_router(port, *workers, **given)
            stack.callback(router.stop)
            return replace(cluster, url=f"http://127.0.0.1:{port}/", port=port)

        one = start(ports[0], "one", missing)
        other = start(ports[1], "other", TRUNKLINE_PROCESSES="2")
        for router in (one, other):
            wait_until(lambda router=router: is_served(router), "a worker is connected")  # type: ignore[misc]
        yield Fleet(redis, one, other, missing)


def is_served(router: PageCluster) -> bool:
    with router.client("acme") as client:
        return len(client.models.list().data) == 1


def test_a_request_of_another_router_is_not_listed_and_the_page_says_where_to_look(page: Browser, fleet: Fleet) -> None:
    request_id = fleet.other.complete("acme", "Once upon a time")
    page.open(fleet.one.url, fleet.one.keys["operator"])
    page.wait("#freshness", "Live")
    page.wait(
        "#requests-scope", r"^Requests of this router\. 2 other router processes are alive: the log line and the trace"
    )
    page.choose("#request-filter", "notable")
    page.wait("#requests-scope", "2 other router processes are alive")
    assert request_id[:12] not in page.everything()
    page.fill("#request-id", request_id)
    page.press("Enter")
    page.wait(
        "#timeline", r"other router processes \(2\) are alive and are not asked: the request's log line and trace name"
    )
    page.check_behaviour("404 (Not Found)")


def test_a_request_of_any_process_of_a_router_is_listed_and_opened_with_its_id_alone(
    page: Browser, fleet: Fleet
) -> None:
    requests = [fleet.other.complete("acme", "Once upon a time") for _ in range(4)]
    page.open(fleet.other.url, fleet.other.keys["operator"])

    def is_found(request_id: str) -> bool:
        """A process that does not answer the other one in a quarter of a second is left out."""
        page.focus("#request-id")
        page.press("Enter")
        return page.is_visible(f'#timeline:has-text("{request_id}") .verdict')

    for request_id in requests:
        page.wait("#request-rows", request_id[:12])
        page.fill("#request-id", request_id)
        wait_until(partial(is_found, request_id), "the request is found")
        page.wait("#timeline .verdict", "First token after")
        page.wait("#timeline .request-facts", r"Router\s*other/[01]")
    page.check_behaviour("404 (Not Found)")


def test_a_user_finds_its_own_requests_alone(page: Browser, fleet: Fleet) -> None:
    own = fleet.other.complete("acme", "There was a fox")
    foreign = fleet.other.complete("zeta", "There was a hare")
    page.open(fleet.other.url, fleet.other.keys["acme"])
    page.wait("#request-rows", own[:12])
    assert foreign not in page.everything()
    page.fill("#request-id", foreign)
    page.press("Enter")
    page.wait("#timeline", "was not found")
    page.check_behaviour("404 (Not Found)")


def test_a_worker_that_stays_connecting_says_why_and_for_how_long(page: Browser, fleet: Fleet) -> None:
    page.open(fleet.one.url, fleet.one.keys["operator"])
    tile = f'#tiles .tile:has-text("{fleet.missing}")'
    page.wait(tile, r"Connecting for \d+ s")
    page.wait(f"{tile} .reason", r"UNAVAILABLE: .*(refused|failed to connect)")
    page.wait(
        "#load-scope",
        "Sums over all workers of this router process, with the requests of every router. It keeps 10 minutes",
    )


def test_without_redis_the_page_shows_what_its_router_knows_and_says_so(page: Browser, fleet: Fleet) -> None:
    own = fleet.one.complete("acme", "Once there was")
    page.open(fleet.one.url, fleet.one.keys["operator"])
    page.wait("#requests-scope", "2 other router processes are alive")
    fleet.redis.kill()
    page.wait("#requests-scope", "⚠ Requests of this router: Redis is lost")
    page.wait("#request-rows", own[:12])
    fleet.redis.start()
    page.wait("#requests-scope", "2 other router processes are alive")
