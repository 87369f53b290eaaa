"""Parameters of tests that have many."""

from collections.abc import Iterable
from typing import Any

import pytest


def one_in(number: int, values: Iterable[Any]) -> list[Any]:
    """The values as parameters of a test. `make test` runs the first one and every `number`-th after it; the others are
    marked as slow."""
    return [pytest.param(value, marks=pytest.mark.slow) if at % number else value for at, value in enumerate(values)]
