"""What all tests share."""

import os
from pathlib import Path

import pytest

# Several torch processes share few cores; each with a pool of threads of its own would mostly wait for the others.
os.environ.setdefault("OMP_NUM_THREADS", "1")

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real models, traces and texts beside the repository; not everybody has it."""
    path = Path(os.environ.get("TRUNKLINE_SHARED", REPOSITORY.parent / "shared"))
    if not path.is_dir():
        pytest.skip(f"{path} is absent: it holds the real models and texts that this test reads")
    return path
