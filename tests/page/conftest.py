"""One browser and one cluster for all tests of the page."""

from collections.abc import Iterator

import pytest

from tests.page.browser import Browser, running_browser
from tests.page.cluster import PageCluster, running_cluster


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    with running_browser() as running:
        yield running


@pytest.fixture(scope="package")
def cluster(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageCluster]:
    """Needs the browser, so that nothing is started where there is none."""
    with running_cluster(tmp_path_factory.mktemp("page"), "--kv-blocks=512") as running:
        yield running


@pytest.fixture
def page(browser: Browser) -> Iterator[Browser]:
    """The browser. The page must have logged no error and called no other host at the end."""
    yield browser
    browser.check_behaviour()
    browser.close()
