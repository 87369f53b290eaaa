"""One cluster for all clients: none of them breaks it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.edge import CLIENTS_ENVIRONMENT, Edge, running_edge
from tests.worker.engine_rig import DEMO_MODEL


@pytest.fixture(scope="package")
def edge() -> Iterator[Edge]:
    with running_edge(DEMO_MODEL) as running:
        yield running


@pytest.fixture(scope="session")
def clients_python() -> Path:
    """The interpreter beside which clients are installed that cannot share an environment with the newest `openai`."""
    python = CLIENTS_ENVIRONMENT / "bin" / "python"
    assert python.exists(), f"{CLIENTS_ENVIRONMENT} is absent: make clients"
    return python
