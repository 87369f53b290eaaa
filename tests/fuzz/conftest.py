"""One router for all fuzzers: what one of them leaves behind, the next one finds."""

from collections.abc import Iterator

import pytest

from tests.fuzz.target import Target, running_target


@pytest.fixture(scope="package")
def target() -> Iterator[Target]:
    with running_target() as running:
        yield running
