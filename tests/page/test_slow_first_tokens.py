"""With a request id alone, the page says why a first token was slow."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.page.browser import Browser
from tests.page.cluster import PageCluster, running_cluster
from tests.page.slow_first_tokens import FEW_PLACES, LITTLE_KV, SLOW_TOKENS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[(FEW_PLACES, 2), (LITTLE_KV, 1)], ids=["few places", "little KV"])
def slow_cluster(
    request: pytest.FixtureRequest, browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PageCluster]:
    arguments, workers = request.param
    with running_cluster(tmp_path_factory.mktemp("slow"), *arguments, workers=workers) as running:
        yield running


def test_the_page_names_the_cause(slow_cluster: PageCluster, page: Browser, tmp_path: Path) -> None:
    made = [slow for slow in SLOW_TOKENS if slow.arguments == slow_cluster.arguments]
    assert made
    for slow in made:
        page.open(slow_cluster.url, slow_cluster.keys["operator"])
        page.wait("#freshness", "Live")
        page.fill("#request-id", slow.make(slow_cluster))
        page.press("Enter")
        page.wait("#timeline .verdict")
        assert slow.cause in page.text("#timeline .verdict"), slow.name
