"""Parameters of tests that have many."""

from collections.abc import Iterable
from typing import Any

import pytest


def some(values: Iterable[Any], of: int = 3) -> list[Any]:
    """The first of each `of` values; the others are marked as slow, so that `make test-slow` has them."""
    return [pytest.param(value, marks=pytest.mark.slow) if at % of else value for at, value in enumerate(values)]
